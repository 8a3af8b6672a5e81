"""Page: texts about a plan as one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment

_TEMPLATE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>{{ title }}</title>
<style>
  body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 90rem; }
  body { padding: 0 1rem; }
  pre { background: #f6f6f4; border-radius: 6px; overflow-x: auto; padding: 1rem; }
  pre { font-size: 13px; }
  nav a { margin-right: 1rem; }
  @media (prefers-color-scheme: dark) {
    body { background: #16181c; color: #e6e6e6; } pre { background: #202329; } a { color: #8ab4ff; }
  }
</style>
<h1>{{ title }}</h1>
<nav>
{% for section in sections %}<a href="#{{ loop.index }}">{{ section.title }}</a>{% endfor %}
</nav>
{% for section in sections %}
<h2 id="{{ loop.index }}">{{ section.title }}</h2>
<pre>{{ section.text }}</pre>
{% endfor %}
</html>
"""


@dataclass(frozen=True)
class Section:
    """A heading and a text in columns."""

    title: str
    text: str


def write_page(path: Path, title: str, sections: Sequence[Section]) -> None:
    """Write the page, and the folders on the way to it."""
    template = Environment(autoescape=True).from_string(_TEMPLATE)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(template.render(title=title, sections=sections))
