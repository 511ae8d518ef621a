"""Hooks that an attachment installs: one list, so that closing removes every one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from bagua_rt.attach.backward import is_running
from bagua_rt.attach.engine import Engine
from bagua_rt.attach.untraced import untraced
from bagua_rt.optim.paired import PairedOptimizer


class _Removable(Protocol):
    def remove(self) -> None: ...


class Hook:
    """A hook that a copied or pickled model does not take along: there it only takes itself out.

    Args:
        body: What to call; None in a copy.
    """

    def __init__(self, body: Callable[..., None] | None = None) -> None:
        self._body = body

    def __call__(self, *args: Any) -> None:
        if self._body is not None:
            self._body(*args)
        elif args and isinstance(args[0], nn.Module):
            hooks = args[0]._forward_pre_hooks
            for key in [key for key, hook in hooks.items() if hook is self]:
                del hooks[key]

    def __deepcopy__(self, memo: dict[int, Any]) -> Hook:
        return Hook()

    def __reduce__(self) -> tuple[type[Hook], tuple[()]]:
        return Hook, ()


# By id, which no other model can have while an attachment holds this one. Nothing stands in the model itself,
# so that its copies and pickles are plain models.
_attachments: WeakValueDictionary[int, object] = WeakValueDictionary()


def attachment_of(module: nn.Module) -> object:
    """The attachment of `module` itself; None without one."""
    return _attachments.get(id(module))


def is_attached(param: torch.Tensor) -> bool:
    """Does an attachment listen to the gradients of `param`?"""
    hooks = getattr(param, "_post_accumulate_grad_hooks", None) or {}
    owners = (getattr(getattr(hook, "func", None), "__self__", None) for hook in hooks.values())
    return any(isinstance(owner, Engine) for owner in owners)


class Hooks:
    """Everything that an attachment has installed in a model and its optimizers."""

    def __init__(self) -> None:
        self._removables: list[_Removable] = []
        self._paired: list[PairedOptimizer] = []
        self._marked: list[nn.Module] = []
        self._of_parameters: dict[int, RemovableHandle] = {}

    def install_on_parameters(self, indices: Iterable[int], engine: Engine) -> None:
        """Tell `engine` of every accumulated gradient. The hook lives as long as the parameter does, and is
        not swapped for another's (torch.utils.swap_tensors): then it is put in force again here."""
        for index in indices:
            param = engine.layout.params[index]
            hooks = param._post_accumulate_grad_hooks
            if hooks is not None:
                param._post_accumulate_grad_hooks = hooks  # a swap leaves them where they are, but not called
            known = self._of_parameters.get(index)
            if known is not None and known.id in (hooks or ()):
                continue
            hook = partial(engine.on_gradient, index)  # torch itself leaves it out of copies and pickles
            self._of_parameters[index] = param.register_post_accumulate_grad_hook(hook)

    def install_on_module(self, module: nn.Module, before_forward: Callable[[bool], None]) -> None:
        """Call ``before_forward(module.training)`` before each forward of `module` outside of a backward."""

        def body(module: nn.Module, _: object) -> None:
            if not is_running():  # else an activation checkpoint runs it again
                before_forward(module.training)

        self._removables.append(module.register_forward_pre_hook(Hook(body), prepend=True))

    def install_on_optimizer(self, optimizer: torch.optim.Optimizer, engine: Engine) -> None:
        """Put the commit gate before each step of `optimizer`."""

        def before(*_: object) -> None:
            engine.before_step(optimizer)

        def after(*_: object) -> None:
            engine.after_step(optimizer)

        if isinstance(optimizer, PairedOptimizer):
            optimizer.before_update = Hook(before)
            self._paired.append(optimizer)
        else:
            self._removables.append(optimizer.register_step_pre_hook(Hook(before)))
        self._removables.append(optimizer.register_step_post_hook(Hook(after)))

    def install_on_all_optimizers(self, engine: Engine) -> None:
        """Count the steps of optimizers that attach() was not given, too."""

        @untraced
        def after(optimizer: torch.optim.Optimizer, *_: object) -> None:
            engine.accord.steps.count(optimizer)

        self._removables.append(register_optimizer_step_post_hook(after))

    def install_on_loading(
        self, module: nn.Module, optimizers: Iterable[torch.optim.Optimizer], engine: Engine
    ) -> None:
        """Notice that state is loaded into `module`, a part of it or an optimizer: by one rank, maybe."""

        def body(*_: object) -> None:
            engine.accord.has_loaded = True

        for part in module.modules():
            if isinstance(part, torch.jit.ScriptModule):  # takes no hooks
                continue
            self._removables.append(part.register_load_state_dict_post_hook(Hook(body)))
        for optimizer in optimizers:
            self._removables.append(optimizer.register_load_state_dict_post_hook(Hook(body)))

    def mark(self, module: nn.Module, attachment: object) -> None:
        """Remember the attachment of `module`, so that a second one can replace it."""
        _attachments[id(module)] = attachment
        self._marked.append(module)

    def remove(self) -> None:
        """Remove every hook. Idempotent."""
        while self._marked:
            _attachments.pop(id(self._marked.pop()), None)
        while self._of_parameters:
            self._of_parameters.popitem()[1].remove()
        while self._removables:
            self._removables.pop().remove()
        while self._paired:
            vars(self._paired.pop()).pop("before_update", None)
