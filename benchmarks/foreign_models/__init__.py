"""Small models of packages outside transformers, built from configurations with random weights.

>>> CASES["timm/vit"]()
Built(model=VisionTransformer(...), args=(...), kwargs={})

A file for each field. A name is that of the package as it is installed, a slash, and the model's.
"""

from benchmarks.foreign_models import (
    generation,
    graphs,
    layers,
    patches,
    series,
    sound,
    tabular,
    text,
    vision,
)

CASES = {
    **vision.CASES,
    **patches.CASES,
    **layers.CASES,
    **text.CASES,
    **sound.CASES,
    **graphs.CASES,
    **tabular.CASES,
    **series.CASES,
    **generation.CASES,
}
