"""`attach`: make a model train data-parallel."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch import nn

from bagua_rt.algorithms.base import Algorithm, Context
from bagua_rt.algorithms.gradient_allreduce import GradientAllReduce
from bagua_rt.attach.agreement import describe, on_all_ranks
from bagua_rt.attach.attached import Attached, Attachment
from bagua_rt.attach.backward import is_running
from bagua_rt.attach.buffers import Buffers
from bagua_rt.attach.engine import Engine
from bagua_rt.attach.generation import Options
from bagua_rt.attach.hooks import Hooks, attachment_of, is_attached
from bagua_rt.attach.layout import Layout
from bagua_rt.attach.names import NamedTensors, name_tensors
from bagua_rt.attach.refusals import call_in_backward
from bagua_rt.attach.resources import Resources, telling_refusals
from bagua_rt.attach.watch import ParameterWatch
from bagua_rt.bucket import ParameterSpec
from bagua_rt.config import RuntimeConfig
from bagua_rt.errors import UsageError
from bagua_rt.optim.paired import PairedOptimizer
from bagua_rt.process_group import ProcessGroup, default_group, torch_has_a_group
from bagua_rt.replicate import kind_without_bytes, replicate_optimizers, replicate_tensors

_MIB = 1024 * 1024


def attach(
    model: nn.Module,
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
    algorithm: Algorithm | None = None,
    *,
    process_group: ProcessGroup | None = None,
    bucket_cap_mb: float = 10.0,
    first_bucket_mb: float = 1.0,
    chunk_mb: float | None = None,
    find_unused_parameters: bool = False,
    ignore: Iterable[str] = (),
    broadcast_buffers: bool = True,
    gradient_as_bucket_view: bool = True,
    commit: Literal["host", "stream"] = "host",
    check: bool = False,
    name: str | None = None,
) -> Attached:
    """Make `model` train data-parallel: same object, same state_dict keys. Collective over the group.

    Parameters (frozen ones too), buffers and the optimizers' state become rank 0's. From then on every
    backward outside of `no_sync` leaves the same gradients on every rank (or does what `algorithm` says),
    and every step of a given optimizer first makes sure of that.

    Args:
        model: The model, on the group's device.
        optimizers: The optimizer, or optimizers, that step its parameters. Without them there is no gate
            before the step, and the algorithm must not need one.
        algorithm: How ranks communicate; None takes the optimizer's own (bagua_rt.optim), else
            GradientAllReduce.
        process_group: The ranks; None takes `default_group`.
        bucket_cap_mb: Most MiB in a bucket; a larger parameter is alone in its own.
        first_bucket_mb: Most MiB in the first bucket.
        chunk_mb: Most MiB in one collective of a plain sum (of gradients or weights; not of what an algorithm
            compresses): a larger bucket is sent in pieces, between which other lanes get their turn. None
            sends each bucket whole. Two ranks get the same bits with it; for more, the order of additions
            is the library's choice by size, as with another bucket size.
        find_unused_parameters: May a parameter lack a gradient? It then counts as zero in the mean, and
            stays untouched if no rank has one. Costs nothing.
        ignore: Names of parameters and buffers to leave alone, beside the model's own
            ``_ddp_params_and_buffers_to_ignore``.
        broadcast_buffers: Make buffers rank 0's before each forward of `model` outside of `no_sync`.
        gradient_as_bucket_view: Let ``.grad`` be memory of the bucket, which saves a copy.
        commit: "host": before a step, the host waits until the gradients are agreed and complete. "stream":
            only the device does, and the host runs ahead until the next backward: torch DDP's bargain, in
            which a communication that fails shows after the step, so the model may have moved by it. On the
            CPU they are the same.
        check: Look for gradients that are not finite, and raise on every rank before the step.
        name: The attachment's name in messages and traces, the same on every rank.

    Returns:
        The handle; keep it as long as the model trains, and `close` it to undo everything.

    Raises:
        UsageError: an argument is not usable; nothing was changed.
        LayoutMismatchError: the ranks' models, optimizers or arguments differ: on every rank.
        ClosedError: the process group was closed.
        CollectiveError: a rank did not come.
    """
    group = group_of(process_group)
    with telling_refusals(group):
        if is_running():
            raise call_in_backward("attach()")
        given = _listed(optimizers)
        _check_arguments(model, given, commit, name)
        _check_sizes(bucket_cap_mb=bucket_cap_mb, first_bucket_mb=first_bucket_mb, chunk_mb=chunk_mb)
        algorithm = _chosen(algorithm, given)
        named = name_tensors(model, ignore)
        _check_tensors(named, group)
        if group.world_size > 1:
            _refuse_renormalised(model, named)
            _refuse_batch_norm_of_nobody(model)
        _close_former(model)
        _refuse_nested(named)
    options = Options(
        cap_bytes=int(bucket_cap_mb * _MIB),
        first_cap_bytes=int(first_bucket_mb * _MIB),
        find_unused_parameters=find_unused_parameters,
        gradient_as_bucket_view=gradient_as_bucket_view,
        check=check,
        commit=commit,
        chunk_bytes=None if chunk_mb is None else int(chunk_mb * _MIB),
    )
    settings = {"algorithm": algorithm, "broadcast_buffers": broadcast_buffers, "options": options}
    resources = Resources(group, name, describe(named, settings))
    try:
        attachment = _make(model, named, given, algorithm, resources, options, broadcast_buffers)
        _install(model, given, attachment)
    except BaseException:
        resources.close()
        raise
    return Attached(attachment, resources.name)


def group_of(process_group: ProcessGroup | None) -> ProcessGroup:
    """The group that is meant.

    Raises:
        UsageError: it is none.
        ClosedError: there is none in this process, but in the one that forked it.
    """
    group = default_group() if process_group is None else process_group
    if not isinstance(group, ProcessGroup):
        raise UsageError(
            "process_group is not usable",
            expected="what init() or new_group() gave",
            got=type(group).__name__,
        )
    return group


def _close_former(model: nn.Module) -> None:
    former = attachment_of(model)
    if isinstance(former, Attachment):
        former.detach(orderly=True)


@torch.inference_mode(False)  # what is allocated here must serve training
@torch.no_grad()
def _make(
    model: nn.Module,
    named: NamedTensors,
    optimizers: tuple[torch.optim.Optimizer, ...],
    algorithm: Algorithm,
    resources: Resources,
    options: Options,
    broadcast_buffers: bool,
) -> Attachment:
    group, world = resources.group, resources.communicators.world
    tensors = {**named.parameters, **named.buffers}
    replicate_tensors(list(tensors.values()), world, group.backend.device)
    names: dict[torch.Tensor, str] = {param: name for name, param in named.parameters.items()}
    replicate_optimizers(optimizers, world, group.backend.device, resources.control, names=names)
    context = Context(
        communicators=resources.communicators,
        device=group.backend.device,
        kernels=group.backend.kernels,
        optimizers=optimizers,
        names=names,
        chunk_bytes=options.chunk_bytes,
    )
    control = resources.control
    engine, stale = on_all_ranks(
        "attach()",
        control,
        lambda: (_engine(model, named, context, algorithm, resources, options), resources.meeting_keys()),
        undo=lambda made: made[0].state.close(),
    )
    group.forget_keys(stale)
    trace_dir = RuntimeConfig.from_environment().trace_dir
    buffers = Buffers(model, named, context, engine, resources.control)
    return Attachment(
        named, context, algorithm, engine, Hooks(), resources, buffers, broadcast_buffers, trace_dir
    )


def _engine(
    model: nn.Module,
    named: NamedTensors,
    context: Context,
    algorithm: Algorithm,
    resources: Resources,
    options: Options,
) -> Engine:
    state = algorithm.bind(context)
    try:
        watch = ParameterWatch(model, named.parameters, named.ignored)
        pipeline, control = resources.pipeline, resources.control
        layout = Layout(named.parameters, watch, context, state, pipeline, control, options)
        return Engine(layout, pipeline, control, options)
    except BaseException:
        state.close()
        raise


def _install(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    attachment: Attachment,
) -> None:
    hooks, engine = attachment.hooks, attachment.engine
    engine.layout.install_hooks = lambda indices: hooks.install_on_parameters(indices, engine)
    hooks.install_on_parameters(engine.layout.plan.order, engine)
    hooks.install_on_module(model, attachment.before_forward)
    for optimizer in optimizers:
        hooks.install_on_optimizer(optimizer, engine)
    hooks.install_on_all_optimizers(engine)
    hooks.install_on_loading(model, optimizers, engine)
    hooks.mark(model, attachment)
    resources = attachment.resources
    resources.describe, resources.listen = engine.describe, engine.background.listen
    resources.on_close(resources.group.on_close(lambda: attachment.detach(orderly=False)))


def _listed(
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
) -> tuple[torch.optim.Optimizer, ...]:
    if not isinstance(optimizers, torch.optim.Optimizer | Iterable):
        optimizers = [optimizers]  # refused below
    given = (optimizers,) if isinstance(optimizers, torch.optim.Optimizer) else tuple(optimizers)
    for optimizer in given:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UsageError(
                "optimizers holds what is no optimizer",
                expected="torch.optim.Optimizer, one or several",
                got=type(optimizer).__name__,
            )
    return given


def _chosen(algorithm: Algorithm | None, optimizers: Iterable[torch.optim.Optimizer]) -> Algorithm:
    paired = [optimizer for optimizer in optimizers if isinstance(optimizer, PairedOptimizer)]
    if algorithm is None:
        if len(paired) > 1:
            raise UsageError(
                "several optimizers bring an algorithm of their own",
                expected="at most one",
                got=", ".join(type(optimizer).__name__ for optimizer in paired),
                fix="attach a model with one of them",
            )
        return paired[0].algorithm if paired else GradientAllReduce()
    if not isinstance(algorithm, Algorithm):
        raise UsageError(
            "algorithm is not usable",
            expected="an Algorithm, as bagua_rt.GradientAllReduce()",
            got=repr(algorithm),
            fix="bagua_rt.algorithms.create(name) makes one from its name",
        )
    return algorithm


def _check_arguments(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    commit: str,
    name: str | None,
) -> None:
    if name is not None and not (isinstance(name, str) and name and name.isprintable()):
        raise UsageError("name is not usable", expected="a printable text, or None", got=repr(name))
    if not isinstance(model, nn.Module):
        raise UsageError("model is not usable", expected="a torch.nn.Module", got=type(model).__name__)
    if isinstance(model, torch.jit.ScriptModule):
        raise UsageError(
            "model is scripted, and takes no hooks",
            expected="a plain module",
            fix="wrap it in another module",
        )
    if commit not in ("host", "stream"):
        raise UsageError("commit is not usable", expected="'host' or 'stream'", got=repr(commit))
    if len({id(optimizer) for optimizer in optimizers}) != len(optimizers):
        raise UsageError("an optimizer was given twice", expected="each once")


def _check_sizes(**sizes: float | None) -> None:
    for argument, value in sizes.items():
        if value is None and argument == "chunk_mb":
            continue
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < 1e6:
            raise UsageError(f"{argument} is not usable", expected="a number of MiB above 0", got=repr(value))


def _refuse_nested(named: NamedTensors) -> None:
    for name, param in named.parameters.items():
        if is_attached(param):
            raise UsageError(
                f"the parameter {name!r} belongs to a model that is attached",
                expected="each parameter in one attachment",
                got="a module within an attached one, or around it",
                fix="close() that attachment first, or attach the outermost module only",
            )


def _refuse_renormalised(model: nn.Module, named: NamedTensors) -> None:
    trained = {id(param): name for name, param in named.trainable.items()}
    for module in model.modules():
        is_embedding = isinstance(module, nn.Embedding | nn.EmbeddingBag)
        if is_embedding and module.max_norm is not None and id(module.weight) in trained:
            raise UsageError(
                f"each forward changes {trained[id(module.weight)]!r}, by this rank's own batch",
                expected="weights that only optimizers move, by what all ranks agree on",
                got=f"an embedding with max_norm={module.max_norm:g}",
                fix="build it without max_norm, and normalise the weight after each step",
            )


def _refuse_batch_norm_of_nobody(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm) and not torch_has_a_group():
            raise UsageError(
                f"the SyncBatchNorm {name!r} would take the statistics of this rank alone",
                expected="a group of torch.distributed, by which it finds the other ranks",
                got="none",
                fix="call torch.distributed.init_process_group() before attach(), or use BatchNorm",
            )


def _check_tensors(named: NamedTensors, group: ProcessGroup) -> None:
    for name, tensor in {**named.parameters, **named.buffers}.items():
        if nn.parameter.is_lazy(tensor):
            raise UsageError(
                f"{name!r} is not initialised yet",
                expected="shapes that are known",
                fix="run a forward first",
            )
        if tensor.device.type == group.device.type and (kind := kind_without_bytes(tensor)):
            raise UsageError(
                f"{name!r} can't be made equal on all ranks: it is {kind}",
                expected="a dense tensor with memory of its own",
                got=type(tensor).__name__,
                fix="name it in ignore, or keep it as a plain tensor",
            )
        if tensor.device.type != group.device.type:
            raise UsageError(
                f"{name!r} is on another device than the process group",
                expected=str(group.device),
                got=str(tensor.device),
                fix=f"move the model with .to('{group.device.type}') before attach()",
            )
    for name, param in named.parameters.items():
        ParameterSpec.of(name, param)
        if (
            param.requires_grad
            and (grad_dtype := getattr(param, "grad_dtype", param.dtype)) is not param.dtype
        ):
            raise UsageError(
                f"the gradient of {name!r} is to have another dtype than the parameter",
                expected=f"{param.dtype}",
                got=f"grad_dtype {grad_dtype}",
                fix="leave grad_dtype as it is, or name the parameter in ignore",
            )
