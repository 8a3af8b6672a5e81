"""The faults of `tests/seeded_faults.py`, room by room: how each would read, and who should see it.

A new law brings a fault that it alone catches. `old` occurs once in its file.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Fault:
    """A slip of a few words in one file, with the tests that are expected to catch it."""

    name: str
    wrong: str  # what a reader would say is wrong
    file: str
    old: str
    new: str
    tests: tuple[str, ...]  # files, or node ids, in the order in which they run

    def count(self, root: Path) -> int:
        """Return how often the old text occurs in its file; 1 if the fault applies."""
        path = root / self.file
        return path.read_text().count(self.old) if path.exists() else 0

    def apply(self, text: str) -> str:
        """Return the text of the file with the fault in it."""
        assert text.count(self.old) == 1, f"{self.name}: {self.old!r} in {self.file}"
        return text.replace(self.old, self.new)


FAULTS = (
    # text, base, cluster
    Fault(
        "suggestion-any-likeness",
        "A misspelt name suggests every name that is a little like it, not the likeliest.",
        "autopar/text/suggestions.py",
        "if likeness == most > 0]",
        "if most >= likeness > 0]",
        ("tests/test_suggestions.py",),
    ),
    Fault(
        "bits-as-bytes",
        "A bandwidth of 400Gb/s is read as if its bits were bytes.",
        "autopar/text/units.py",
        "(1 if bits is None else 8)",
        "(8 if bits is None else 1)",
        ("tests/test_what_if.py::test_what_is_said_in_bits_is_an_eighth_of_that_in_bytes",),
    ),
    Fault(
        "error-without-line",
        "Errors that are raised without a source no longer show the user's line.",
        "autopar/errors.py",
        "self.source = source or caller()",
        "self.source = source",
        ("tests/test_errors.py::test_bad_input_is_explained",),
    ),
    Fault(
        "lock-shared",
        "Two programs hold the lock of one folder at the same time.",
        "autopar/base/files.py",
        "fcntl.flock(descriptor, fcntl.LOCK_EX)\n        yield",
        "fcntl.flock(descriptor, fcntl.LOCK_SH)\n        yield",
        ("tests/runtime/test_checkpoints.py::test_programs_save_to_one_path_at_once",),
    ),
    Fault(
        "lock-ignored",
        "A file that another program is writing counts as abandoned, and is deleted.",
        "autopar/base/files.py",
        "return not isinstance(error, BlockingIOError)",
        "return isinstance(error, BlockingIOError)",
        ("tests/runtime/test_written_files.py",),
    ),
    Fault(
        "price-ring",
        "A ring of p ranks is priced as if it moved the tensor p - 1 times.",
        "autopar/cluster/collective_counts.py",
        "return PASSES.get(kind, 1) * (ranks - 1) / ranks",
        "return PASSES.get(kind, 1) * (ranks - 1)",
        ("tests/cost/test_model.py",),
    ),
    Fault(
        "latency-tree",
        "A tree of messages waits p - 1 times, as a ring does, instead of log2(p) times.",
        "autopar/cluster/collective_counts.py",
        "return PASSES.get(kind, 1) * log2(ranks)",
        "return PASSES.get(kind, 1) * (ranks - 1)",
        ("tests/cost/test_model.py",),
    ),
    Fault(
        "links-stale-key",
        "The links along one axis are given for those along another, or along none.",
        "autopar/cluster/links.py",
        "key = mesh, tuple(axes), along",
        "key = mesh, tuple(axes)",
        ("tests/test_cluster.py::test_places_of_a_pipeline_have_the_links_of_their_own_machines",),
    ),
    # solver, collectives, strategies
    Fault(
        "value-as-bound",
        "The search under a limit takes the cost of a choice for a bound of all choices.",
        "autopar/solver/lagrangian.py",
        "        lowest = self._lowest(multiplier)\n        bound = lowest.bound - multiplier",
        "        lowest = self._lowest(multiplier)\n        bound = lowest.value - multiplier",
        ("tests/search/test_optimum_law.py::test_a_search_ends_in_its_time_with_an_honest_gap",),
    ),
    Fault(
        "dominated-by-none",
        "A strategy counts as dominated if another costs as little, though it needs more memory.",
        "autopar/solver/dominated.py",
        "dominates &= _no_worse(",
        "dominates |= _no_worse(",
        (
            "tests/search/test_optimum_law.py::test_pruning_keeps_the_only_strategy_that_fits",
            "tests/search/test_optimum_law.py::test_pruning_changes_no_optimum_whatever_the_multiplier",
        ),
    ),
    Fault(
        "gather-backward",
        "The backward of an all-gather keeps a slice of one rank's gradient, and adds nothing up.",
        "autopar/collectives/movement.py",
        '("all_gather", True): "reduce_scatter"',
        '("all_gather", True): "slice"',
        ("tests/collectives/test_virtual.py",),
    ),
    Fault(
        "rule-reduction-cut",
        "A maximum over a dim that is cut counts as a partial sum, and a sum needs its dim whole.",
        "autopar/strategies/rules/reductions.py",
        'whole = [] if is_sum else [f"d{i}" for i in reduced]',
        'whole = [f"d{i}" for i in reduced] if is_sum else []',
        ("tests/strategies/test_rule_law.py::test_law",),
    ),
    Fault(
        "saved-elementwise",
        "Backward of an elementwise operator is said to keep the output, where it keeps the input.",
        "autopar/strategies/rules/elementwise.py",
        'register_rule(SAVES_INPUT, "... -> ...", saved="0", traits=LEADING)',
        'register_rule(SAVES_INPUT, "... -> ...", saved="output", traits=LEADING)',
        ("tests/strategies/test_saved.py::test_saved",),
    ),
    Fault(
        "random-shift",
        "The hash of random draws shifts its last round by another number of bits.",
        "autopar/strategies/kernels/keyed_draws.py",
        "_SHIFTS = (15, 13, 16)",
        "_SHIFTS = (15, 13, 13)",
        ("tests/strategies/test_draws.py",),
    ),
    # nn, capture
    Fault(
        "balance-without-count",
        "The balance loss of a mixture is not multiplied by the number of experts.",
        "autopar/nn/moe.py",
        "loss = loss + self.balance_loss * count * even",
        "loss = loss + self.balance_loss * even",
        ("tests/test_moe.py::test_the_losses_of_a_router_that_prefers_nothing",),
    ),
    Fault(
        "mean-of-kept-dims",
        "A mean over some dims is divided by the number of all elements.",
        "autopar/capture/normalisations/losses.py",
        "count = prod(call.shapes[0][dim] for dim in dims) if call.shapes[0] else 1",
        "count = prod(call.shapes[0]) if call.shapes[0] else 1",
        ("tests/capture/test_normalisations.py::test_a_mean_is_a_sum_and_a_count",),
    ),
    Fault(
        "buffer-not-written",
        "A buffer that forward writes only once keeps its old value after the step.",
        "autopar/capture/normalisations/inplace.py",
        "if self.version.get(node, 0):\n",
        "if self.version.get(node, 0) > 1:\n",
        ("tests/capture/test_writes.py", "tests/capture/test_programs.py"),
    ),
    Fault(
        "annotation-dropped",
        "Of two annotations of one parameter the later one replaces the other without a word.",
        "autopar/capture/annotations.py",
        'found.setdefault(f"{prefix}.{name}" if prefix else name, []).append(annotation)',
        'found[f"{prefix}.{name}" if prefix else name] = [annotation]',
        ("tests/test_errors.py::test_bad_input_is_explained[contradictory parameters]",),
    ),
    Fault(
        "ties-not-compared",
        "A plan is accepted for a model that ties other parameters.",
        "autopar/capture/fingerprint.py",
        'found += _named("tied parameter", self.tied, other.tied)',
        'found += _named("tied parameter", self.tied, self.tied)',
        ("tests/runtime/test_same_program.py::test_a_plan_of_another_program_is_refused",),
    ),
    # cost, search
    Fault(
        "late-gradients",
        "Sums of gradients that end a step are counted at 0.9 of their seconds.",
        "autopar/cost/state_price.py",
        "                late += seconds",
        "                late += 0.9 * seconds",
        ("tests/cost/test_collective_law.py::test_cut_states_move_as_long_as_whole_ones",),
    ),
    Fault(
        "hidden-at-full-speed",
        "Computing hides all of a collective beside it, as if neither slowed the other.",
        "autopar/cost/rooflines.py",
        'Formula("hidden", Min(o * C, K))',
        'Formula("hidden", Min(C, K))',
        ("tests/cost/test_model.py::test_computing_beside_a_collective_hides_a_part_of_it",),
    ),
    Fault(
        "optimizer-bytes-by-storage",
        "Optimizer states are counted where a parameter is stored, not where it is optimized.",
        "autopar/cost/footprint.py",
        "return stored * element.master, gradient, stored * element.optimizer, 0, copy",
        "kept = elements(places.storage) * element.optimizer\n"
        "    return stored * element.master, gradient, kept, 0, copy",
        ("tests/test_states.py::test_states_of_large_models_take_what_is_known_of_them",),
    ),
    Fault(
        "once-a-step-each-time",
        "The search counts what a step does once as often as it has micro-batches.",
        "autopar/search/edge_costs.py",
        "self.share = 1 / self.microbatches",
        "self.share = 1.0",
        (
            "tests/cost/test_kernels_price.py::test_the_search_adds_up_to_the_price_with_cast_parameters",
        ),
    ),
    # passes, pipeline
    Fault(
        "draws-per-microbatch",
        "Dropout draws the same numbers in every micro-batch.",
        "autopar/passes/microbatches.py",
        "torch.tensor([0, number]",
        "torch.tensor([0, 0]",
        ("tests/test_random.py::test_bits_are_those_of_one_device",),
    ),
    Fault(
        "recompute-too-short",
        "A region that runs again in backward ends one operator too early.",
        "autopar/passes/recompute_marks.py",
        "for node in nodes[: last_kept + 1]:",
        "for node in nodes[:last_kept]:",
        ("tests/test_recompute.py::test_each_region_runs_once_more_and_no_further_than_needed",),
    ),
    Fault(
        "checker-split-backward",
        "The checker lets an input gradient run before the forward of its micro-batch.",
        "autopar/pipeline/checker.py",
        'elif action.kind in ("B", "I") and not done.issuperset(keys):',
        'elif action.kind == "B" and not done.issuperset(keys):',
        ("tests/pipeline/test_checker.py::test_input_gradient_before_forward",),
    ),
    Fault(
        "version-of-the-next-update",
        "The checker lets a forward read a version that the next update makes.",
        "autopar/pipeline/weight_versions.py",
        "elif max(wanted) > latest:",
        "elif max(wanted) > latest + 1:",
        ("tests/pipeline/test_weight_versions.py",),
    ),
    Fault(
        "stale-weights-stay",
        "After an asynchronous step the parameters keep the values of the step before.",
        "autopar/runtime/parameters/stale_weights.py",
        "return self._read(self.holders[-1])",
        "return False",
        ("tests/pipeline/test_delayed_updates.py",),
    ),
    Fault(
        "forwards-ahead-read-old-weights",
        "In a run, forwards of the next step read the version that this step reads.",
        "autopar/runtime/parameters/stale_weights.py",
        "len(self.holders) - 1 - self.delay + steps_ahead",
        "len(self.holders) - 1 - self.delay",
        ("tests/pipeline/test_runs.py",),
    ),
    Fault(
        "one-forward-too-many",
        "A stage of 1F1B starts with one forward more than its depth asks for.",
        "autopar/pipeline/schedules/one_f_one_b.py",
        "ahead = min(stages - 1 - stage, microbatches)",
        "ahead = min(stages - stage, microbatches)",
        ("tests/pipeline/test_formulas.py",),
    ),
    Fault(
        "memory-split-backward",
        "A split backward is said to keep nothing between input and weight gradients.",
        "autopar/pipeline/memory/activation_counts.py",
        "(-1, -1, 1, 0, -again)",
        "(-1, -1, 0, 0, -again)",
        ("tests/pipeline/test_formulas.py", "tests/pipeline/test_step_memory.py"),
    ),
    Fault(
        "sum-before-replicas",
        "The sum of a stage's gradient starts when the last of its replicas alone is ready.",
        "autopar/pipeline/simulation/synchronization.py",
        "max(starts.get((rank, stage), 0.0) for rank in schedule.replicas_of(stage))",
        "starts.get((schedule.replicas_of(stage)[-1], stage), 0.0)",
        (
            "tests/pipeline/test_simulator.py::test_a_sum_begins_when_all_replicas_have_the_gradient",
        ),
    ),
    Fault(
        "link-busy-in-latency",
        "A link carries no other message until the one before it has arrived.",
        "autopar/pipeline/simulation/action_times.py",
        "free[link], arrivals[sent] = left, left + cost.alpha",
        "free[link] = arrivals[sent] = left + cost.alpha",
        (
            "tests/pipeline/test_simulator.py::test_a_message_leaves_when_the_one_before_has_left_and_not_arrived",
        ),
    ),
    Fault(
        "makespan-as-bound",
        "The lower bound of a step is what a step takes with some spread of the work.",
        "autopar/pipeline/simulation/compute_lower_bound.py",
        "bound = max(bound, program.Objective().Value())",
        "bound = max(bound, timeline.makespan)",
        ("tests/pipeline/test_compute_lower_bound.py",),
    ),
    # planner, report, plans, verification
    Fault(
        "bound-counts-twice",
        "The least seconds of what runs again count its cheap operators twice: no bound any more.",
        "autopar/planner/bounds.py",
        "dear_seconds = max(0.0, self.seconds_of(region.work, pieces) - cheap_seconds)",
        "dear_seconds = self.seconds_of(region.work, pieces)",
        ("tests/test_bounds.py",),
    ),
    Fault(
        "simpler-at-any-price",
        "A simpler plan is taken however much slower it is than the fastest.",
        "autopar/planner/record.py",
        "limit = min(costs, default=0.0) * (1 + SIMPLER)",
        "limit = min(costs, default=0.0) * (1 + 1 / SIMPLER)",
        ("tests/test_simplicity.py",),
    ),
    Fault(
        "follow-ups-forgotten",
        "What follows from an answer is not asked: the templates are all that is weighed.",
        "autopar/planner/loop.py",
        "self._add(rule.follow(entry, self), rule)",
        "self._add((), rule)",
        ("tests/test_auto_memory.py",),
    ),
    Fault(
        "trace-durations",
        "Events of a trace last from the start of the step, not from their own.",
        "autopar/report/trace.py",
        '"dur": (self.end - self.start) * 1e6',
        '"dur": self.end * 1e6',
        (
            "tests/report/test_traces.py::test_without_a_pipeline_calls_stand_inside_of_actions",
            "tests/report/test_traces.py::test_measured_is_simulated_in_its_order",
        ),
    ),
    Fault(
        "page-blocks-once",
        "The page counts the seconds of equal blocks once, not as often as there are blocks.",
        "autopar/report/module_tree.py",
        "return seconds_of_calls + sum(part.count * part.seconds for part in self.parts.values())",
        "return seconds_of_calls + sum(part.seconds for part in self.parts.values())",
        ("tests/report/test_pictures.py::test_the_tree_has_all_time_and_all_parameters",),
    ),
    Fault(
        "page-backward-time",
        "The bar of a step shows the seconds of forward for those of backward.",
        "autopar/report/step_parts.py",
        '("backward", "B0"): cost.compute * cost.backward /',
        '("backward", "B0"): cost.compute * cost.forward /',
        ("tests/report/test_pictures.py::test_the_parts_of_a_step_are_the_step",),
    ),
    Fault(
        "plan-places-unsound",
        "A plan is accepted though it reads a parameter elsewhere than it says.",
        "autopar/plans/soundness.py",
        "if not is_read or not places.is_nested or",
        "if not places.is_nested or",
        (
            "tests/passes/test_parameter_places.py::test_places_that_contradict_one_another_are_refused",
        ),
    ),
    Fault(
        "coarse-is-verified",
        "A result counts as verified though rounding may move it by as much as it is large.",
        "autopar/verification/references.py",
        "ok = error <= (allowed if allowed <= PROVING_LIMIT else EXACT_ERROR)",
        "ok = error <= allowed",
        (
            "tests/test_verify.py::test_what_rounding_may_explain_and_nothing_proves_is_neither_right_nor_wrong",
        ),
    ),
    # states, runtime
    Fault(
        "zero2-keeps-gradients",
        "`zero2` leaves gradients whole between micro-batches, as `zero1` does.",
        "autopar/states.py",
        '"zero2": States(gradients="all", optimizer="all")',
        '"zero2": States(optimizer="all")',
        (
            "tests/test_states.py::test_what_moves_once_a_step_and_what_for_each_micro_batch",
            "tests/test_states.py::test_traffic_of_a_step",
        ),
    ),
    Fault(
        "zero1-cuts-gradients",
        "Gradients are cut as finely as optimizer states, whatever the states say of them.",
        "autopar/states.py",
        "factors = (stored, self.gradients, self.optimizer) if learns",
        "factors = (stored, self.optimizer, self.optimizer) if learns",
        ("tests/test_states.py::test_what_moves_once_a_step_and_what_for_each_micro_batch",),
    ),
    Fault(
        "loss-scale-multiplied",
        "Gradients of a scaled loss are multiplied by the scale once more.",
        "autopar/runtime/module/loss_scale.py",
        "gradient.div_(scale)",
        "gradient.mul_(scale)",
        ("tests/test_precision.py::test_an_overflow_skips_the_step_and_halves_the_scale",),
    ),
    Fault(
        "good-steps-not-forgotten",
        "Good steps from before an overflow count towards the next growth of the loss scale.",
        "autopar/runtime/module/loss_scale.py",
        "self.good = self.good + 1 if is_good else 0",
        "self.good = self.good + 1 if is_good else self.good",
        ("tests/test_precision.py::test_every_so_many_good_steps_more_is_tried",),
    ),
    Fault(
        "mode-ignored",
        "A call in evaluation mode is served by the program of training.",
        "autopar/runtime/module/running_program.py",
        "return self.takes(call) and is_in_mode and learns_alike",
        "return self.takes(call) and learns_alike",
        ("tests/runtime/test_same_program.py::test_another_mode_makes_a_program_if_it_is_another",),
    ),
    Fault(
        "gradient-zero-for-none",
        "Parameters that a step does not reach get gradients of zeros instead of None.",
        "autopar/runtime/parameters/gradient_buckets.py",
        "return {name: grad for name, grad in grads.items() if name in reached}",
        "return grads",
        ("tests/runtime/test_buckets.py::test_only_buckets_that_are_reached_are_summed",),
    ),
    Fault(
        "bucket-too-many",
        "A bucket whose parameters nothing reached is summed all the same.",
        "autopar/runtime/parameters/gradient_buckets.py",
        "is_needed = bucket.riders or not bucket.names.isdisjoint(reached)",
        "is_needed = bucket.riders or bucket.names",
        ("tests/runtime/test_buckets.py::test_only_buckets_that_are_reached_are_summed",),
    ),
    Fault(
        "buffer-written-each-turn",
        "A counter of steps counts micro-batches, and not the last of them.",
        "autopar/runtime/backends/stage_runs.py",
        "later = frozenset() if is_last else self.backend.program.buffers_updated_once",
        "later = self.backend.program.buffers_updated_once if is_last else frozenset()",
        ("tests/passes/test_microbatches.py::test_a_counter_of_steps_counts_steps",),
    ),
    Fault(
        "tied-norm-twice",
        "The norm of gradients counts a parameter in each stage that reads it.",
        "autopar/runtime/backends/distributed_backend.py",
        "if self.ranks.places_of(self._readers.stages(name))[0] == self.ranks.place\n",
        "if self.ranks.place in self.ranks.places_of(self._readers.stages(name))\n",
        (
            "tests/pipeline/test_executor_processes.py"
            "::test_gradients_are_clipped_by_the_norm_of_all_stages",
        ),
    ),
    Fault(
        "tied-memory-twice",
        "Memory that two tensors share is counted for each of them.",
        "autopar/runtime/observation/memory_in_use.py",
        "seen.add(memory_of(tensor))",
        "seen.add(id(tensor))",
        ("tests/runtime/test_memory.py::test_memory_that_tensors_share_is_counted_once",),
    ),
    Fault(
        "receives-out-of-order",
        "Receives are posted in the order in which messages are needed, not in that of the sends.",
        "autopar/runtime/backends/stage_messages.py",
        "due = next(self._due[sender])",
        "due = key",
        ("tests/pipeline/test_executor_processes.py",),
    ),
    Fault(
        "digest-of-any-file",
        "Weights count as having right digests if one of their files has.",
        "autopar/runtime/parameters/weight_files.py",
        "self.have_digests &= ",
        "self.have_digests |= ",
        ("tests/runtime/test_safetensors.py::test_a_header_that_was_changed_has_no_right_digest",),
    ),
    Fault(
        "file-too-long",
        "A safetensors file with bytes behind its last tensor is accepted.",
        "autopar/runtime/parameters/weight_files.py",
        "if end != size:",
        "if end > size:",
        ("tests/runtime/test_safetensors.py::test_files_that_are_none_are_refused",),
    ),
    Fault(
        "index-leads-outside",
        "An index of weights may name files above its folder.",
        "autopar/runtime/parameters/weight_files.py",
        'if Path(name).is_absolute() or ".." in Path(name).parts:',
        "if Path(name).is_absolute():",
        ("tests/runtime/test_safetensors.py::test_an_index_leads_to_its_own_folder",),
    ),
    Fault(
        "failure-of-each-rank",
        "Every rank that fails overwrites the first failure of the world.",
        "autopar/runtime/launching/rank_liveness.py",
        'self.first_failure = store.compare_set(_FIRST, "", failure).decode()',
        "store.set(_FIRST, failure)\n            self.first_failure = store.get(_FIRST).decode()",
        ("tests/runtime/test_failures.py",),
    ),
    Fault(
        "failure-not-compared",
        "A rank with the error of all ranks reports that another one failed first.",
        "autopar/runtime/launching/failures.py",
        "if _without_rank(first) == _without_rank(failure):",
        "if first == failure:",
        ("tests/runtime/test_failures.py",),
    ),
    # optimizers
    Fault(
        "trial-on-small-tensors-alone",
        "An optimizer that treats large matrices as wholes updates pieces of them.",
        "autopar/runtime/optimizers/update_scope.py",
        "trial.is_elementwise(small) and trial.is_elementwise(large)",
        "trial.is_elementwise(small)",
        ("tests/runtime/test_optimizers.py",),
    ),
    Fault(
        "trial-at-the-first-rate",
        "A schedule that begins with a rate of 0 hides what an update depends on.",
        "autopar/runtime/optimizers/update_scope.py",
        "_RATE = 1e-2",
        "_RATE = 0.0",
        ("tests/runtime/test_optimizers.py",),
    ),
    Fault(
        "partial-gradients-unsummed",
        "`ap.optimizer` updates by this rank's terms of gradients that wait for their sum.",
        "autopar/runtime/optimizers/local_optimizer.py",
        "        self.sum_waiting()\n        for updated in self.updated_groups:\n"
        "            updated.complete_gradients()\n            updated.begin()\n",
        "        pass\n",
        ("tests/distributed/test_optimizers.py",),
    ),
    # doors, commands
    Fault(
        "strict-by-default",
        "`parallelize` refuses operators without rules, though nobody asks it to.",
        "autopar/api.py",
        "    strict: bool = False,\n",
        "    strict: bool = True,\n",
        ("tests/test_plan.py::test_the_doors_spell_out_the_same_options",),
    ),
    Fault(
        "verify-exit-code",
        "`autopar verify` ends with 0 though coarse numbers leave some results open.",
        "autopar/commands/verify.py",
        "return 0 if verification.ok else 1",
        "return 1 if verification.differs else 0",
        ("tests/test_verify.py::test_the_command_fails_where_coarse_numbers_leave_it_open",),
    ),
    # sizes
    Fault(
        "size-without-rehearsal",
        "A new size runs on a known program whatever forward does there.",
        "autopar/runtime/module/resizing.py",
        "return record is not None and record.is_same(calls, filled(numbers, size))",
        "return True or record is not None and record.is_same(calls, filled(numbers, size))",
        ("tests/test_sized_programs.py::test_a_program_that_looks_alike_is_not_taken",),
    ),
    Fault(
        "size-in-another-mode",
        "What was rehearsed in training serves other sizes in evaluation as well.",
        "autopar/runtime/module/running_program.py",
        "if (call.training, call.unfrozen) != (known.training, known.unfrozen):",
        "if call.unfrozen != known.unfrozen:",
        ("tests/test_sized_programs.py::test_a_program_that_looks_alike_is_not_taken",),
    ),
    Fault(
        "caches-in-turn",
        "Caches that forward returns are taken to be those that it was given, in turn.",
        "autopar/capture/key_value_caches.py",
        "return [numbers.get(id(cache)) for cache in _caches(output)]",
        "return [*numbers.values()][: len(_caches(output))]",
        ("tests/test_lengths.py::test_caches_are_told_apart_in_another_order",),
    ),
    Fault(
        "numbers-that-no-tensor-holds",
        "Products of whole numbers in the arguments are the program's however large they become.",
        "autopar/capture/number_inputs.py",
        'computed.asked(GuardQuestion("class of number"))',
        "_ = GuardQuestion",
        ("tests/test_number_programs.py::test_every_whole_number_is_computed_as_in_python",),
    ),
    Fault(
        "zero-of-either-sign",
        "0.0 and -0.0 share a program whose branch tells them apart.",
        "autopar/base/exact_values.py",
        'return struct.pack("d", value) == struct.pack("d", other)',
        "return value == other",
        ("tests/test_number_programs.py::test_every_float_is_computed_as_in_python",),
    ),
    Fault(
        "left-by-another-program",
        "What a program leaves in Python is not looked for in what others read.",
        "autopar/runtime/module/programs.py",
        "require_independent(captured, running.plan.original)",
        "_ = require_independent",
        ("tests/test_state_programs.py::test_what_another_call_has_left_is_not_overlooked",),
    ),
    Fault(
        "frozen-unseen",
        "A forward that asks which parameters learn keeps its program when some are frozen.",
        "autopar/runtime/module/running_program.py",
        "learns_alike = call.unfrozen <= self.unfrozen and goes_alike",
        "learns_alike = call.unfrozen <= self.unfrozen",
        ("tests/test_state_programs.py::test_a_step_goes_by_what_learns_now",),
    ),
    Fault(
        "one-cache-twice",
        "A call may hand over one cache for two, which a program takes for two.",
        "autopar/runtime/module/running_program.py",
        "if original.changes_containers:",
        "if False and original.changes_containers:",
        ("tests/test_state_programs.py::test_one_cache_in_two_arguments_is_refused",),
    ),
)
