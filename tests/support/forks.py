"""A forked random region around a replicated dropout of GPT-2, which is recomputed inside it or not."""

from partbook.core import Schedule


def forked(sch: Schedule) -> None:
    sch["transformer.h.0"].fork_rng(shared=("mlp.dropout",))


def recomputed_inside(sch: Schedule) -> None:
    forked(sch)
    sch["transformer.h.0.mlp"].checkpoint()
