"""The communication thread in a run: when it begins, and what is said of how gradients are added up."""

from __future__ import annotations

from remote_payload.train.run import Run
from remote_payload.train.run_control import ThreadStatus
from remote_payload.train.sync import NCCL, PEER, Choice


def sum_gradients(run: Run, status: ThreadStatus) -> None:
    """The thread's life: NCCL's trial when the targets are loaded, then a sum a step.

    It ends with the last step, and before the first when replicas add up by peer copies after all.
    """
    status.enter("waiting for the targets to load")
    for target in run.targets:  # NCCL starts while nobody else fills or frees a GPU's memory
        target.wait()
    status.enter("trying NCCL")
    run.reduction.serve(status)


def say_choice(run: Run, choice: Choice) -> None:
    """Write an event and a line for the way that replicas add up; nothing where there is one replica."""
    if run.replicas == 1:
        return
    run.events.write("reduction", way=choice.way, reason=choice.reason, trial_s=choice.trial_s)
    by = {NCCL: "NCCL", PEER: "peer copies"}[choice.way]
    run.log(f"Gradients are added up by {by}: {choice.reason}")
