"""What a trainer did that would move weights by wrong gradients: the errors that say so."""

from __future__ import annotations

from collections.abc import Sequence

from bagua_rt.errors import ClosedError, UsageError


def second_gradient(name: str) -> UsageError:
    """A parameter's gradient came twice in one backward."""
    return UsageError(
        f"the gradient of {name!r} came twice in one backward",
        expected="each parameter's gradient once",
        got="a second one: of a reentrant checkpoint, for a parameter used twice, or of another thread",
        fix="use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)",
    )


def gradient_of_frozen(name: str) -> UsageError:
    """A gradient came of a parameter that is in no bucket."""
    return UsageError(
        f"{name!r} got a gradient, but it was frozen when the backward began",
        expected="requires_grad to change between steps",
        fix="unfreeze it before the model's forward, on every rank",
    )


def weights_moved(name: str) -> UsageError:
    """A step inside of backward moves by local gradients, unnoticed."""
    return UsageError(
        f"{name!r} was changed while backward ran",
        expected="weights that stay as they are until the gradients are synchronised",
        got="a change in place, as an optimizer makes that steps in a gradient hook",
        fix="step after backward(); the replicas may differ now",
    )


def step_in_backward() -> UsageError:
    """An optimizer that was given steps inside of backward."""
    return UsageError(
        "optimizer.step() inside of a backward",
        expected="a step after backward(), when all gradients are synchronised",
        got="a step in a gradient hook, which would move by local gradients",
        fix="step after backward()",
    )


def step_after_exception() -> UsageError:
    """A step follows a backward that raised."""
    return UsageError(
        "optimizer.step() after a backward that raised",
        expected="a backward that ran to its end",
        got="gradients of which only some are there, and only some are averaged",
        fix="call zero_grad() and repeat the step",
    )


def step_without_synchronising(names: Sequence[str]) -> UsageError:
    """A step follows backwards under no_sync() only, for the parameters `names`."""
    return UsageError(
        "optimizer.step() with gradients that were accumulated under no_sync() only",
        expected="a backward outside of no_sync() before the step",
        got=f"local gradients of {', '.join(names[:3])}",
        fix="run the last backward outside of no_sync(), or call zero_grad()",
    )


def call_in_backward(call: str) -> UsageError:
    """Inside of a backward, `call` would wait for what only the end of that backward brings."""
    return UsageError(
        f"{call} inside of a backward",
        expected="a call between steps",
        got="a call in a gradient hook",
        fix="call it after backward(), on every rank",
    )


def closed_under_way() -> ClosedError:
    """close() or shutdown() in a hook, another thread or a signal handler, while a backward is under way."""
    return ClosedError(
        "the attachment was closed while a backward ran, or waited for the other ranks",
        fix="close() and shutdown() between steps, on the thread that trains",
    )


def join_out_of_step() -> UsageError:
    """The algorithm leaves the stage in which it could be joined, inside of a join()."""
    return UsageError(
        "join() can't go on: the algorithm no longer communicates gradients in backward",
        expected="an algorithm that communicates gradients in backward",
        fix="end the loop with join() while it warms up; then give all ranks as many batches as each other",
    )


def buckets_matter() -> UsageError:
    """A search for the best bucket size, where the size would change what is learned."""
    return UsageError(
        "autotune() can't change the buckets: this algorithm's results depend on how they are cut",
        expected="an algorithm whose state says cuts_freely, as gradient_allreduce",
        fix="choose bucket_cap_mb at attach()",
    )


def search_under_way() -> UsageError:
    """A second search, before the first has ended."""
    return UsageError(
        "autotune() is under way already",
        expected="one search at a time",
        fix="wait until run.tuned is there",
    )


def no_background(name: str) -> UsageError:
    """pause() or resume() of an algorithm whose rounds all belong to a step."""
    return UsageError(
        f"{name} has no rounds in the background",
        expected="an algorithm that has, as async_model_average",
        fix="pause() and resume() are not needed",
    )
