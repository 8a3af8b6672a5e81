"""Module: the parallel module, from the arguments of a call to its outputs and gradients.

Read `parallel_module.py` first. A call becomes a `call_signature.py`, which chooses one of the
`programs.py`, each a `running_program.py`; its results pass through `call_outputs.py` or
`step_loss.py`, its gradients through `direct_calls.py` and `gradient_accumulation.py`.
`submodule_view.py` has what the module takes from the model. `plan_broadcast.py`, `batch_checks.py`
and `call_agreement.py` make ranks agree; `local_inputs.py`, `batch_slices.py`, `data_loader.py` are
for ranks that bring their own slices. `trials.py` runs several plans and keeps the fastest.
"""
