"""Runtime: carries out the programs of a plan, on a virtual mesh or on processes.

Read the folders in this order:

    module/        the parallel module: calls, steps, and a program for each kind of call
    backends/      where programs run: all ranks in this process, or one rank of `torch.distributed`
    parameters/    tensors in pieces: their places, gathered copies and sums of gradients
    execution/     local graphs as Python code: eager, compiled, with recomputation and offload
    observation/   figures, memory and times of steps
    checkpoints/   saving and loading under any plan and number of ranks
    launching/     starting ranks, and stopping all of them when one fails
"""
