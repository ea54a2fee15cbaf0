"""Splitting a causal LM into stages, and its experts over ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from overlap1f1b.cut.bits import storage_of
from overlap1f1b.engine import split_blocks
from overlap1f1b.integrations.transformers import checkpoint
from overlap1f1b.integrations.transformers.adapters import CONFIG, adapter_in, base_of, writes_adapters
from overlap1f1b.integrations.transformers.experts import Found, adopt, find
from overlap1f1b.integrations.transformers.parameters import in_place_of, leave_elsewhere
from overlap1f1b.integrations.transformers.shell import Shell
from overlap1f1b.integrations.transformers.stage import LanguageModelStage, StageRange
from overlap1f1b.moe.router import check_factory
from overlap1f1b.schedule import Placement, Program
from overlap1f1b.schedule.values import checked
from overlap1f1b.transport.consensus import Together
from overlap1f1b.transport.mesh import Mesh, check_ranks

OF_NEXT_TOKENS = (None, "ForCausalLM", "ForConditionalGeneration")
"""Names that transformers gives to a loss of next tokens; None if the class of the model does not tell."""


class SplitModel(dict[int, LanguageModelStage]):
    """The stages of this rank by their number, for an :class:`~overlap1f1b.Engine`; ``model`` is what was split."""

    def __init__(
        self, model: Any, stages: Mapping[int, LanguageModelStage], placement: Placement, mesh: DeviceMesh | None
    ) -> None:
        super().__init__(stages)
        self.model, self._placement, self._mesh = model, placement, mesh

    def loss_fn(self, loss: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the model's own loss of a microbatch: the loss of ``forward(labels=target)`` with auxiliary losses.

        It is the mean over the tokens whose next token has a label other than −100; zero with gradients of zero,
        auxiliary losses included, if a microbatch has none. Give the engine :meth:`count_tokens`, too, for the mean
        over the step's tokens. Another loss is a function ``(own_loss, logits [B, S, V], labels [B, S]) → scalar``.

        Raises:
            ValueError: The model classifies, so its labels are not next tokens.
        """
        return torch.where(self.count_tokens(labels) > 0, loss, 0.0)

    def count_tokens(self, labels: Tensor, *_: Tensor) -> Tensor:
        """Return the tokens that count in a microbatch's loss, for :class:`Engine`; ValueError for a classifier."""
        base = base_of(self.model)
        if getattr(base, "loss_type", None) not in OF_NEXT_TOKENS:
            raise ValueError(
                f"{type(base).__name__}, whose labels are not next tokens; allowed: a causal LM, or a loss_fn of your "
                "own without count_tokens"
            )
        return (labels[..., 1:] != -100).sum()

    @property
    def routers(self) -> list[nn.Module]:
        """The modules of this rank's layers that compute router logits."""
        parts = [stage.part for stage in self.values()]
        return [router for part in parts for n in range(part.start, part.end) for router, _ in part.shell.routers(n)]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of this rank with their names in the model; experts' are this rank's part."""
        for stage in self.values():
            yield from stage.named_parameters()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return the parameters of this rank."""
        return (parameter for _, parameter in self.named_parameters())

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part of the model's state dict."""
        return {name: value for stage in self.values() for name, value in stage.state_dict().items()}

    @checked
    def save_pretrained(self, folder: Path | str) -> None:
        """Write the whole model to a folder that ``from_pretrained`` opens. All ranks must call this.

        There is one file for each stage. No rank holds more than its stages, one of them with all its experts. Weights
        of an earlier save in the folder are replaced. Of PEFT's model only its adapters are written, as PEFT does.

        Raises:
            ValueError: The model has adapters, but is not PEFT's.
            OSError: A rank cannot write; raised on every rank.
        """
        adapters = writes_adapters(self.model)
        # Look in the whole model, so that all ranks raise.
        if not adapters and (adapter := adapter_in(self.model)) is not None:
            raise ValueError(
                f"{adapter[0] or 'the model'} ({type(adapter[1]).__name__}) is an adapter, and the folder would hold "
                "neither an adapter nor a model; allowed: PEFT's model around it, adapters that are merged first, or "
                "state_dict() of each rank"
            )
        folder, mesh, count = Path(folder), Mesh(self._mesh), self._placement.stages

        def write() -> None:
            writes = mesh.rank("ep") == 0
            for number, stage in self.items():
                if self._placement.replicas(number)[0] == mesh.rank("pp") and mesh.rank("dp") == 0:
                    checkpoint.save_part(folder, number, count, stage, self.model, adapters=adapters, writes=writes)

        together = Together(mesh, f"{folder} cannot be written")
        together.each(write, OSError)  # a rank that cannot write must not leave the others waiting
        finish = checkpoint.join_adapter if adapters else checkpoint.write_index
        together.first(partial(finish, folder, count, self.model))

    @checked
    def load_pretrained(self, folder: Path | str, device: torch.device | str | None = None) -> None:
        """Fill this rank's part from a local folder of pretrained weights, and read only this part.

        >>> with torch.device("meta"):  # takes no memory
        ...     model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
        >>> stages = split_model(model, program, mesh)
        >>> stages.load_pretrained(folder)  # before engine and optimizer, which need the parameters

        Args:
            folder: Folder with ``model.safetensors.index.json`` or ``model.safetensors``, in the layout of the model's
                published checkpoints or of its modules; or one that PEFT has written, for the adapters of its model.
            device: Device for parameters on the meta device; by default the mesh's, or the CPU without a mesh.

        Raises:
            ValueError: The folder has neither file, lacks a tensor, or has one of another shape.
        """
        check_factory(None, device)
        device = torch.device(device or (self._mesh.device_type if self._mesh is not None else "cpu"))
        load = checkpoint.load_adapters if (Path(folder) / CONFIG).exists() else checkpoint.load_stages
        load(Path(folder), self.model, self.values(), device)

    def train(self, mode: bool = True) -> SplitModel:
        """Set the model to training, or to evaluation."""
        self.model.train(mode)
        return self

    def eval(self) -> SplitModel:
        """Set the model to evaluation."""
        return self.train(False)


class RankModule(nn.Module):
    """The stages of this rank in one module, by the names of the whole model; ``split`` is for an engine."""

    split: SplitModel

    def __init__(self, stages: SplitModel) -> None:
        super().__init__()
        for stage in stages.values():
            stage.hang(self)
        self.__dict__["split"] = stages  # not by assignment: a model may have a module of this name

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:  # of the model, which code that makes optimizers asks for its config, for example
            if "split" not in vars(self):
                raise
            return getattr(self.split.model, name)

    def forward(self, *_: Any, **__: Any) -> Any:
        """Refuse a call as of the whole model."""
        raise ValueError(
            "a call of this rank's stages as a whole model; allowed: super().prediction_step of a trainer, whose "
            "compute_loss gets a model to call"
        )

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the model, also of modules without weights that its own forward uses."""
        self.split.train(mode)
        return super().train(mode)


@checked
def split_model(
    model: nn.Module,
    program: Program,
    mesh: DeviceMesh | None = None,
    *,
    inputs: Sequence[str] = ("input_ids",),
    block_weights: Sequence[float] | None = None,
    grouped: bool | None = None,
) -> SplitModel:
    """Split a causal LM of transformers into stages, and its experts over the ranks along "ep"; return this rank's.

    >>> program = o1.build_schedule("dualpipev", ranks=2, microbatches=8)
    >>> mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "ep"))
    >>> stages = split_model(AutoModelForCausalLM.from_config(config), program, mesh)
    >>> engine = o1.Engine(stages, program, mesh=mesh, loss_fn=stages.loss_fn)
    >>> result = engine.step(input_ids, target=labels)

    Layers and modules inside them may be compiled in place (``layer.compile()``).

    Every rank passes the whole model with the same weights, or on the meta device to fill it afterwards
    (:meth:`SplitModel.load_pretrained`). The rank keeps its part; the memory of other layers and experts is freed. Each
    layer gets the arguments that the model's own forward gives it, which also computes the loss.

    Args:
        model: A causal LM with experts, as it was built or loaded.
        program: The program to play; its placement gives the rank of each stage.
        mesh: A mesh with any of the dimensions "pp", "dp" and "ep"; None for one rank.
        inputs: Names of the model's arguments for a step's inputs, in order: ``input_ids`` and, for example,
            ``attention_mask`` or ``position_ids``. A step takes them as a tuple, or as a mapping by these names, such
            as a tokenizer's output; None leaves an input out of this step.
        block_weights: Relative costs of the layers for the split; by default stages have equally many layers.
        grouped: Whether experts with weights in the usual layout (``gate_up_proj [E, 2·I, H]``, ``down_proj [E, H,
            I]``) run as grouped products with separate weight gradients, instead of by the model's own forward. By
            default they do if several ranks share them; on one rank the model's own forward gives bit-equal gradients.

    Raises:
        ValueError: The model is dense, quantised, on several devices or an encoder-decoder; its experts or layers are
            not recognised; the model or its experts are compiled; there are more stages than layers; the experts are
            not divisible by the ranks; experts for the engine have an adapter; or its config asks for hidden states or
            attentions of layers.
    """
    # 1. Find layers and experts, and the modules around the layers.
    check_ranks(program, mesh)
    found = find(model)
    _check_compiled(model, found)
    placement = program.placement
    if placement.stages > len(found.layers):
        raise ValueError(f"{len(found.layers)} layers for {placement.stages} stages; allowed: at least one a stage")
    names = tuple(inputs)
    if not names or names[0] != "input_ids":
        raise ValueError(f"inputs {list(names)}; allowed: input_ids, and others after it")
    shell = Shell(model, found)
    # 2. Split the layers over the stages, and the experts over the ranks.
    coordinate = {} if mesh is None else dict(zip(mesh.mesh_dim_names or (), mesh.get_coordinate() or (), strict=False))
    parts = split_blocks(found.layers, placement.stages, block_weights)
    held = sorted({stage for _, stage in placement.places(coordinate.get("pp", 0))})
    last = placement.stages - 1
    starts = [sum(map(len, parts[:number])) for number in range(placement.stages + 1)]
    group = mesh.get_group("ep") if mesh is not None and "ep" in coordinate and mesh["ep"].size() > 1 else None
    if group is not None or grouped:
        for name, (module, count) in found.experts.items():
            adopt(model, module, count, group, name, grouped=grouped is not False)
    # 3. Make this rank's stages, and free the weights of all others.
    ties = _untie(shell, [range(*pair) for pair in pairwise(starts)]) if last else {}
    stages = {}
    for number in held:
        part = StageRange(shell, starts[number], starts[number + 1], names)
        tied = {name: pair[number == last] for name, pair in ties.items()} if number in (0, last) else {}
        stages[number] = LanguageModelStage(part, tied)
    kept = {id(p) for stage in stages.values() for p in stage.parameters()}
    if any(id(p) not in kept for p in model.parameters()):
        # Modules stay, without their weights: the forward reads their attributes.
        elsewhere = [*found.layers]
        elsewhere += shell.before.values() if 0 not in held else ()
        elsewhere += shell.after.values() if last not in held else ()
        for module in elsewhere:
            if not any(id(p) in kept for p in module.parameters()):
                leave_elsewhere(model, module)
                vars(module)["forward"] = partial(_is_elsewhere, type(module).__name__)
        vars(model)["generate"] = partial(_is_elsewhere, f"{type(model).__name__}.generate")
    if group is not None or len(held) < placement.stages:
        for name in ("save_pretrained", "state_dict"):
            vars(model)[name] = partial(_of_a_part, name)
    return SplitModel(model, stages, placement, mesh)


def _check_compiled(model: nn.Module, found: Found) -> None:
    """Refuse what is compiled as a whole and has to be cut: an engine runs each layer by itself, and experts apart."""
    path = found.prefix.split(".")
    cut = {".".join(path[:length]) for length in range(len(path) + 1)} | found.experts.keys()
    for name, module in model.named_modules():
        if hasattr(module, "dynamo_ctx") or (name in cut and module._compiled_call_impl is not None):
            raise ValueError(
                f"torch.compile of {name or type(model).__name__}; allowed: layer.compile() of each layer, or of "
                "modules inside it other than the experts"
            )


def _of_a_part(name: str, *_: Any, **__: Any) -> None:
    """Refuse what would be without the experts and layers of other ranks."""
    raise ValueError(
        f"{name} of a model of which a rank has a part; allowed: save_pretrained of what split_model returns or "
        "save_model of a trainer, which write the whole; state_dict of what split_model returns, a rank's part"
    )


def _is_elsewhere(name: str, *_: Any, **__: Any) -> None:
    """Refuse a call that needs the weights of other ranks."""
    raise ValueError(
        f"a call of {name}, for which other ranks have the weights; allowed: step and evaluate of the engine, or "
        "from_pretrained of the folder that save_pretrained or a trainer's save_model has written"
    )


def _alone(module: nn.Module) -> nn.Module:
    """Return a module with the parameters and buffers of another one, as a holder of its own."""
    alone = copy(module)
    children = {name: None if child is None else _alone(child) for name, child in module._modules.items()}
    vars(alone).update(_parameters={**module._parameters}, _buffers={**module._buffers}, _modules=children)
    return alone


def _untie(shell: Shell, parts: Sequence[range]) -> dict[str, tuple[nn.Parameter, nn.Parameter]]:
    """Give the modules after the layers copies of parameters that they share with the modules before the layers.

    Return each such parameter and its copy, by the parameter's name before the layers. Raise ValueError if another
    parameter belongs to two stages.
    """
    names = {id(p): f"{name}.{label}" for name, m in shell.before.items() for label, p in m.named_parameters()}
    ties: dict[str, tuple[nn.Parameter, nn.Parameter]] = {}
    both = {id(part) for module in shell.before.values() for part in module.modules()}
    for after in list(shell.after.values()):
        for holder in list(after.modules()):
            holder._modules |= {n: _alone(m) for n, m in holder._modules.items() if m is not None and id(m) in both}
    for module in {part for after in shell.after.values() for part in after.modules()}:
        for label, parameter in list(module.named_parameters(recurse=False)):
            if (name := names.get(id(parameter))) is not None:
                if name not in ties:
                    ties[name] = (parameter, in_place_of(parameter, parameter.detach().clone(), name, both=True))
                module.register_parameter(label, ties[name][1])
    # A tensor and its transpose may be two parameters with one memory.
    seen: dict[tuple[int, int], int] = {}
    for number, part in enumerate(parts):
        held = {f"{shell.prefix}.{index}": shell.layers[index] for index in part}
        held |= shell.before if number == 0 else {}
        held |= shell.after if number == len(parts) - 1 else {}
        for prefix, module in held.items():
            for label, parameter in module.named_parameters(prefix):
                memory = storage_of(parameter), int(parameter.storage_offset())
                if seen.setdefault(memory, number) != number:
                    raise ValueError(
                        f"parameter {label} belongs to stages {seen[memory]} and {number}; allowed: shared inside a "
                        "stage, or one parameter of two modules, before and after the layers"
                    )
    return ties
