"""``model_provider``: a model that Megatron did not write, with a schedule, where Megatron asks for its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from .build import Asked, build_chunks
from .config import ConfigError
from .groups import find_groups
from .stage import StageModel


class ModelProvider:
    """What Megatron's ``get_model`` calls for the modules of a rank, one call for each of its virtual stages.

    Megatron-LM's ``pretrain`` takes it as its model_provider; ``provide`` is the same under the name that
    Megatron-Bridge calls.
    """

    def __init__(
        self,
        build_model: Callable[[], nn.Module],
        schedule: Any,
        schedule_args: Any = None,
        *,
        cuts: str | Sequence[str] | None = None,
        weights: Any = None,
        config: TransformerConfig | Mapping[str, Any] | None = None,
    ) -> None:
        self._build = build_model
        self._options = {"schedule": schedule, "schedule_args": schedule_args, "cuts": cuts, "weights": weights}
        self._config = config
        self._waiting: dict[int, StageModel] = {}
        # Megatron-Bridge sets it before it calls provide.
        self._pg_collection: Any = None

    def __call__(
        self,
        pre_process: bool | None = True,
        post_process: bool | None = True,
        vp_stage: int | None = None,
        config: TransformerConfig | None = None,
        pg_collection: Any = None,
        **_: Any,
    ) -> StageModel:
        """The module of this rank's stage, or of its virtual stage ``vp_stage``.

        ``config`` and ``pg_collection`` default to the provider's own, then to Megatron-LM's arguments and
        ``parallel_state``. Further keywords of other versions are taken and not needed. Collective: every rank calls
        it. Raises ConfigError, ScheduleError or WeightsError before anything is filled.
        """
        number, asked = vp_stage or 0, Asked(pre_process, post_process, vp_stage)
        if number == 0:
            given = self._config if config is None else config
            groups = find_groups(self._pg_collection if pg_collection is None else pg_collection)
            self._waiting = dict(enumerate(build_chunks(self._build, groups, given, asked, **self._options)))
        if number not in self._waiting:
            raise ConfigError(
                f"vp_stage={number} was asked for, and there are the virtual stages {sorted(self._waiting)}: Megatron "
                "asks for them in turn, from 0"
            )
        stage = self._waiting[number]
        problem = asked.contradicts(stage.index, stage.pre_process, stage.post_process)
        if problem:
            raise ConfigError(problem)
        return self._waiting.pop(number)

    def provide(
        self, pre_process: bool | None = None, post_process: bool | None = None, vp_stage: int | None = None
    ) -> StageModel:
        """The same, as Megatron-Bridge calls it."""
        return self(pre_process, post_process, vp_stage)

    def finalize(self) -> None:
        """Nothing: everything is checked when the model is provided."""


def model_provider(
    build_model: Callable[[], nn.Module],
    schedule: Any,
    schedule_args: Any = None,
    *,
    cuts: str | Sequence[str] | None = None,
    weights: Any = None,
    config: TransformerConfig | Mapping[str, Any] | None = None,
) -> ModelProvider:
    """A model provider for Megatron: the model that ``build_model`` makes, scheduled, as Megatron's own would be.

    ``build_model()`` gives the untouched transformers model, best on the meta device; ``weights`` (a Hugging Face
    folder, a dense model, or an int that seeds fresh initialisation) fills it, by default a model on the meta device
    with the seed of rank 0, whatever the mesh. ``schedule`` (a name, ``file.py:function`` or a function) and its
    ``schedule_args`` are those of every dialect. The schedule's own cuts make the stages of pp > 1, else ``cuts``
    (paths, or "auto": balanced by FLOPs). ``config``: a TransformerConfig, or fields of one that is derived from the
    model's config; None: Megatron-LM's arguments, where it runs.
    """
    return ModelProvider(build_model, schedule, schedule_args, cuts=cuts, weights=weights, config=config)
