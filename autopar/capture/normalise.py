"""Normalise: fewer forms, the same program. Each step is a small function of a GraphBuilder.

The order matters: first the program becomes functional, then every node becomes one tensor, then
each operator gets its one form; what nothing uses is dropped at the end.
"""

from __future__ import annotations

from autopar.capture.graph_builder import GraphBuilder, Normalisation
from autopar.capture.normalisations import (
    attention,
    bags,
    cleanup,
    constants,
    draws,
    experts,
    flattened,
    indexing,
    inplace,
    linear,
    loops,
    losses,
    norms,
    parts,
    products,
    shapes,
    strides,
    tuples,
)
from autopar.capture.values import refresh_with_gradients
from autopar.errors import unforeseen

NORMALISATIONS: tuple[Normalisation, ...] = (
    cleanup.drop_assertions,
    draws.number_draws,
    cleanup.drop_dropout,  # it would be a view, so it precedes functionalise
    cleanup.slopes_are_drawn_in_training_alone,
    norms.rms_norms,
    norms.batch_norms,  # makes writes to buffers visible, so it precedes functionalise
    bags.bags_are_one_result,
    losses.chunked_products_are_whole,
    inplace.filled_diagonals_are_views,
    parts.composites_are_their_parts,  # some change what they are given
    tuples.split_into_slices,  # views as well
    strides.strides_are_written_out,  # as the model's own strides are, which writes may change
    inplace.functionalise,
    strides.strided_views_are_copies,
    cleanup.note_unread_annotations,
    cleanup.drop_dead_code,
    cleanup.copies_are_views,
    # one tensor a node
    tuples.split_into_slices,  # of copies
    tuples.single_results,
    # nothing that does nothing
    cleanup.canonical_names,
    cleanup.canonical_casts,
    cleanup.numbers_are_as_in_memory,
    cleanup.drop_copies,
    cleanup.creations_read_no_tensor,
    cleanup.nothing_is_not_joined,
    strides.bits_are_of_pieces,
    cleanup.norms_of_vectors,
    cleanup.values_alone_are_read,
    shapes.repeats_are_expands,
    shapes.canonical_reshapes,
    shapes.canonical_transposes,
    shapes.canonical_expands,
    shapes.canonical_slices,
    shapes.canonical_selections,
    indexing.counted_dims_are_kept,
    indexing.own_elements_are_gathered,
    indexing.masked_writes_are_choices,
    cleanup.drop_identities,
    experts.experts_are_one_operator,
    loops.loops_are_scans,
    # one form for each product and loss
    linear.pad_by_numbers,
    products.products_of_two,
    products.dims_contracted_together,
    products.chains_of_products,
    linear.split_sums_of_products,
    linear.products_are_matmul,
    linear.transposed_products_are_linear,
    linear.set_biases_apart,
    flattened.move_flattening_down,
    shapes.merge_reshapes,
    losses.single_samples_are_batches,
    losses.losses_of_elements,
    losses.pools_of_one_point_are_means,
    losses.means_are_sums,
    losses.cross_entropies,
    shapes.merge_reshapes,
    shapes.undo_permutations,
    cleanup.drop_identities,
    # what does not depend on the inputs
    refresh_with_gradients,  # whether a gradient flows; no calls are made after it
    cleanup.drop_detaches,
    cleanup.merge_duplicates,
    attention.recognise_masks,
    cleanup.drop_dead_code,
    constants.fold_constants,
    cleanup.drop_dead_code,
    cleanup.casts_stand_where_they_are_read,
    draws.draws_follow_places,
)


def normalise(builder: GraphBuilder) -> None:
    """Apply every normalisation, in order."""
    for normalisation in NORMALISATIONS:
        try:
            normalisation(builder)
        except Exception as error:
            raise unforeseen("capture gives one form to", builder.looked_at, error) from error
