"""The stages of a rank under torch.distributed.pipelining: a whole batch in, its loss out, gradients complete."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from partbook.core import PartbookError, ScheduledModel
from partbook.core.pipeline import Wiring, rank_of, refuse_unknown, subtree

from ..micro_batches import Batch, LossFunction, arguments_of, check_same, loss_of, micro_batches_of, on_device
from ..ranks import communication_device
from .orders import make_forward_order, make_order, placement_of
from .reduction import Reduction
from .stage import MicroBatch, PipelineStage, StageModule


class PipelineModel:
    """The stages of this rank, run in the order of one of torch's pipeline schedules.

    ``module`` holds their modules under the model's paths. Every rank of a pipeline, and its tp groups, is given the
    same batches: a dict of the model's arguments, which is cut along dim 0 into ``micro_batches``, or a list of
    micro-batches, whose sizes may differ. The loss is the model's own, or ``loss_fn(output, labels)`` with what the
    batch has as ``labels``. ``device`` is that of a rank without parameters.
    """

    def __init__(
        self,
        scheduled: ScheduledModel,
        order: str,
        micro_batches: int,
        loss_fn: LossFunction | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        mesh, stages = scheduled.mesh, scheduled.stages
        assert scheduled.pipeline is not None
        self.module, self.micro_batches, self.order, self.loss_fn = scheduled.model, micro_batches, order, loss_fn
        self._scheduled, self._pipeline = scheduled, scheduled.pipeline
        tensors = (*self.module.parameters(), *self.module.buffers())
        self._device = next((t.device for t in tensors), torch.device(device or communication_device(mesh)))
        self._last_rank = rank_of(len(stages) - 1, mesh.pp, placement_of(order))
        held = scheduled.pipeline.held
        modules = [
            StageModule(
                subtree(self.module, held[stage.index]), stage.index, self._device, stage.index * mesh.dp + mesh.dp_rank
            )
            for stage in stages
            if stage.module is not None
        ]
        self._stages = [PipelineStage(module, len(stages), mesh) for module in modules]
        self._reduction = Reduction(scheduled)
        self._orders: dict[tuple[bool, int], Any] = {}
        self._checked: set[bool] = set()

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.module.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.module.named_parameters()

    def step(self, batch: Batch) -> Tensor:
        """Forward and backward of a batch: the loss, mean over its micro-batches and dp, equal on all ranks.

        Gradients are added to the parameters', complete as in one process: those of tied parameters summed over the
        stages, all averaged over dp. Collective. Raises AgreementError, the first time, where the ranks of a pipeline
        are given different batches, and ValueError for one that does not fit.
        """
        if not torch.is_grad_enabled():
            raise RuntimeError("step() needs gradients enabled; eval() runs without them")
        self.module.train()
        batches = self._micro_batches(batch, training=True)
        if len(batches) != self.micro_batches:
            raise ValueError(f"the batch has {len(batches)} micro-batches, not micro_batches={self.micro_batches}")
        with self._reduction.of_step():
            return self._run(batches, training=True)

    def eval(self, batch: Batch) -> Tensor:
        """The loss of a batch in evaluation mode, without gradients; a list may hold any number of micro-batches."""
        with _evaluating(self.module):
            return self._run(self._micro_batches(batch, training=False), training=False)

    def outputs(self, batch: Batch) -> list[Any] | None:
        """What the model gives in evaluation mode for each micro-batch, on the ranks of the last stage; else None."""
        with _evaluating(self.module):
            batches = self._micro_batches(batch, training=False, needs_loss=False)
            found: list[Any] = []
            self._run_order(batches, False, lambda output, labels: found.append(output))
        return found if self._scheduled.mesh.pp_rank == self._last_rank else None

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise PartbookError(
            "a model that is cut into pipeline stages cannot be called: its micro-batches are interleaved\n"
            "  hint: loss = pipeline.step(batch) runs forward and backward of a whole batch, pipeline.eval(batch) "
            "evaluates, pipeline.outputs(batch) gives what the model would"
        )

    # ------------------------------------------------------------------ before a step

    def _micro_batches(self, batch: Batch, *, training: bool, needs_loss: bool = True) -> list[MicroBatch]:
        if training not in self._checked:
            check_same(batch, self._scheduled.mesh)
            self._checked.add(training)
        return [self._micro_batch(one, training, needs_loss) for one in micro_batches_of(batch, self.micro_batches)]

    def _micro_batch(self, batch: dict[str, Any], training: bool, needs_loss: bool) -> MicroBatch:
        labels = batch.pop("labels", None) if self.loss_fn is not None else None
        labels = pytree.tree_map(lambda x: x.to(self._device) if isinstance(x, Tensor) else x, labels)
        named = {name: on_device(name, value, self._device) for name, value in arguments_of(batch).items()}
        refuse_unknown(self._scheduled.original.skeleton, named)
        wiring = self._pipeline.wiring(named, training)
        if needs_loss and self.loss_fn is None:
            _refuse_without_loss(wiring)
        values = wiring.values(self._pipeline.skeleton, named)
        return MicroBatch(wiring.at(values), values, labels)

    # ------------------------------------------------------------------ in a step

    def _run(self, batches: list[MicroBatch], training: bool) -> Tensor:
        """The mean of the losses, over dp too."""
        losses: list[Tensor] = []

        def finish(output: Any, labels: Any) -> Tensor:
            # Not a view, which torch could not detach in place.
            loss = loss_of(output, labels, self.loss_fn) / len(batches)
            losses.append(loss.detach())
            return loss

        self._run_order(batches, training, finish)
        mesh = self._scheduled.mesh
        total = torch.zeros((), dtype=sum_dtype(self._pipeline.skeleton), device=self._device)
        if losses:
            total += torch.stack(losses).sum()
        dist.broadcast(total, group=mesh.pp_group, group_src=self._last_rank)
        if mesh.dp > 1:
            dist.all_reduce(total.div_(mesh.dp), group=mesh.dp_group)
        return total

    def _run_order(self, batches: list[MicroBatch], training: bool, finish: Callable[[Any, Any], Any]) -> None:
        for stage in self._stages:
            stage.load(batches, finish)
        order = self._order(training, len(batches))
        # The stages know their micro-batches by number. torch wants a target for each where it has a loss function.
        run = order.step if training else order.eval
        run(target=torch.arange(len(batches)), return_outputs=False)
        for stage in self._stages:
            stage.clear()

    def _order(self, training: bool, micro_batches: int) -> Any:
        key = (training, micro_batches)
        if key not in self._orders:
            make = make_order if training else make_forward_order
            self._orders[key] = make(self.order, self._stages, micro_batches, _first)
        return self._orders[key]


def sum_dtype(model: nn.Module) -> torch.dtype:
    """In which losses and norms of a model are summed: the same on every rank."""
    dtypes = {parameter.dtype for parameter in model.parameters()}
    return torch.float64 if torch.float64 in dtypes else torch.float32


def _first(output: Any, _number: Tensor) -> Any:
    """torch's loss function: the last stage has computed it."""
    return output


def _refuse_without_loss(wiring: Wiring) -> None:
    """On every rank, where the last stage would find none."""
    [flat] = next(node for node in wiring.kind.graph.nodes if node.op == "output").args
    tree = pytree.tree_unflatten(list(flat), wiring.kind.output)
    loss = tree.get("loss") if isinstance(tree, Mapping) else tree
    if not isinstance(loss, fx.Node) or loss.meta["val"].dim():
        raise ValueError(
            "the model gives no loss for this batch\n"
            "  hint: labels in the batch for a transformers model, else initialize(loss_fn=...)"
        )


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    was_training = module.training
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        module.train(was_training)
