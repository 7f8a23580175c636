"""Traced, fused, replaced and recomputed modules on two ranks: the untouched model's numbers, no further collective."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import models
import partbook.dialects.deepspeed as on_deepspeed
from counting import Collectives
from partbook.core import Schedule, cat, consolidate, find_schedule, gradients, module
from partbook.dialects.pytorch import initialize
from partbook.schedules.parallel import column, enter, row, split_vocabulary
from ranks import on_ranks

SP = {"sequence_parallel": True}
EAGER = {"attn_implementation": "eager"}
BIASED = {"attention_bias": True, "mlp_bias": True}
NAMES = ("q_proj", "k_proj", "v_proj")


def traced(sch: Schedule) -> None:
    for node in [*sch.find("**.attn"), *sch.find("**.self_attn"), *sch.find("**.mlp")]:
        node.trace()


def whole_blocks(sch: Schedule) -> None:
    for node in [*sch.find("transformer.h.*"), *sch.find("model.layers.*")]:
        node.trace()


def bias_act(x: Any, bias: Any) -> Any:
    return module("act")(x + bias)


def gated(gate: Any, up: Any, gate_bias: Any, up_bias: Any) -> Any:
    return module("act_fn")(gate + gate_bias) * (up + up_bias)


def fused_gelu(sch: Schedule, compiler: Any = None) -> None:
    for mlp in sch.select("transformer.h.*.mlp"):
        mlp["c_fc"].decompose()
        mlp["c_proj"].decompose()
        mlp.fuse(mlp.match(bias_act), compiler=compiler)


def torchscript_gelu(sch: Schedule) -> None:
    fused_gelu(sch, "torchscript")


def inductor_gelu(sch: Schedule) -> None:
    fused_gelu(sch, "inductor")


def fused_gate(sch: Schedule) -> None:
    for mlp in sch.select("model.layers.*.mlp"):
        for linear in mlp.find(nn.Linear):
            linear.decompose()
        mlp.fuse(mlp.match(gated), compiler="torchscript")


def eager_core(q: Any, k: Any, v: Any, mask: Any, p: Any, training: Any, dtype: Any) -> Any:
    probs = functional.softmax(torch.matmul(q, k.transpose(-1, -2)) * 8**-0.5 + mask, dim=-1)
    probs = functional.dropout(probs.type(dtype), p, training)
    return torch.matmul(probs, v), probs


def recomputed_core(sch: Schedule) -> None:
    for attn in sch.select("transformer.h.*.attn"):
        attn.checkpoint(at=attn.match(eager_core))


def is_efficient(node: Any) -> bool:
    return node.target is torch._C._nn.scaled_dot_product_attention


def recomputed_sdpa(sch: Schedule) -> None:
    for attn in [*sch.find("**.attn"), *sch.find("**.self_attn")]:
        [at] = attn.find(node=is_efficient)
        attn.checkpoint(at=at)


def qkv(x: Any) -> Any:
    return module("q_proj")(x), module("k_proj")(x), module("v_proj")(x)


def fused_qkv(attn: Any) -> nn.Linear:
    linears = [attn.get_submodule(name) for name in NAMES]
    bias, dtype = linears[0].bias is not None, linears[0].weight.dtype
    return nn.Linear(32, sum(linear.out_features for linear in linears), bias, dtype=dtype, device="meta")


def replaced_qkv(sch: Schedule) -> None:
    """The whole schedule of a Llama, with q, k and v as one product that is split by segments."""
    split_vocabulary(sch, "model.embed_tokens", "lm_head")
    for block in sch.select("model.layers.*"):
        attn, mlp = block["self_attn"], block["mlp"]
        widths = tuple(attn[name].module.out_features for name in NAMES)
        parameters = [name for name, _ in attn["q_proj"].module.named_parameters()]
        mapping = {name: cat([f"{part}.{name}" for part in NAMES]) for name in parameters}
        attn.replace(fused_qkv, at=attn.match(qkv), name="qkv_proj", mapping=mapping)
        column(attn["qkv_proj"], segments=widths)
        enter(attn, False, reader=attn["qkv_proj"])
        row(attn["o_proj"], False)
        column(mlp["gate_proj"])
        column(mlp["up_proj"])
        enter(mlp, False)
        row(mlp["down_proj"], False)


Steps = Callable[[Schedule], None]

# family, what its model is built with, options of its schedule (None: the steps are all of it), steps before, after
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None, Steps | None, Steps | None]] = {
    "gpt2 traced, then sharded": ("gpt2", {}, {}, traced, None),
    "gpt2 sharded, then traced": ("gpt2", {}, {}, None, traced),
    "gpt2 blocks": ("gpt2", {}, {}, None, whole_blocks),
    "gpt2 fused gelu before it is sharded": ("gpt2", {}, {}, fused_gelu, None),
    "gpt2 fused gelu, sequence parallel": ("gpt2", {"tied": False}, SP, None, torchscript_gelu),
    "gpt2 compiled gelu": ("gpt2", {}, {}, None, inductor_gelu),
    "gpt2 recomputed core": ("gpt2", EAGER, {}, None, recomputed_core),
    "gpt2 recomputed block around its recomputed core": ("gpt2", {}, {"checkpoint_ratio": 1.0}, recomputed_sdpa, None),
    "llama traced, then sharded": ("llama", {}, {}, traced, None),
    "llama sequence parallel": ("llama", BIASED, SP, None, traced),
    "llama fused gate": ("llama", BIASED, {}, None, fused_gate),
    "llama replaced qkv": ("llama", {**BIASED, "use_cache": False}, None, None, replaced_qkv),
    "llama one kv head, recomputed core": ("llama", {"kv_heads": 1}, {}, None, recomputed_sdpa),
}


def schedule_of(case: str) -> Callable[[Schedule], None]:
    family, _, options, before, after = CASES[case]

    def schedule(sch: Schedule) -> None:
        if before is not None:
            before(sch)
        if options is not None:
            find_schedule(family)(sch, options)
        if after is not None:
            after(sch)

    return schedule


def dense_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """By hand: next-token cross-entropy in the model's own dtype (transformers casts the logits to float32)."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    logits = model(**inputs).logits
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def close(found: Tensor, wanted: Tensor, name: str = "", tolerance: float = 1e-9) -> None:
    limit = tolerance * float(wanted.detach().abs().max())
    torch.testing.assert_close(found, wanted, rtol=0, atol=limit, msg=lambda text: f"{name}: {text}")


@pytest.mark.parametrize("case", CASES)
@on_ranks(2)
def test_tp_2_equals_the_dense_model(rank, case):
    """2 AdamW steps, with padding and without, of two lengths; then evaluation."""
    family, built_with, *_ = CASES[case]
    dense = getattr(models, family)(layers=1, **built_with).double()
    model = copy.deepcopy(dense)
    run, scheduled = initialize(model, schedule_of(case), tp=2)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2, eps=1e-5) for each in (dense, model)]
    for step in range(2):
        batch = models.batch(seed=step, padded=step == 0, length=16 - 2 * step)
        loss, wanted = run(**batch).loss, dense_loss(dense, batch)
        wanted.backward()
        loss.backward()
        close(loss, wanted, f"loss of step {step}")
        found = gradients(scheduled)
        assert set(found) == {name for name, _ in dense.named_parameters()}
        for name, parameter in dense.named_parameters():
            close(found[name], parameter.grad, f"gradient of {name} in step {step}")
        for each in optimizers:
            each.step()
            each.zero_grad()
    full, state = consolidate(scheduled), dense.state_dict()
    assert list(full) == list(state)
    for name, value in state.items():
        close(full[name], value, name)
    batch = models.batch(seed=7, padded=True)
    with torch.no_grad():
        close(model.eval()(**batch).loss, dense_loss(dense.eval(), batch), "evaluation")


def collectives(family: str, built_with: dict[str, Any], options: dict[str, Any], steps: Steps | None) -> Any:
    def schedule(sch: Schedule) -> None:
        find_schedule(family)(sch, options)
        if steps is not None:
            steps(sch)

    run, _ = initialize(getattr(models, family)(layers=2, **built_with), schedule, tp=2)
    batch = models.batch(padded=True)
    run(**batch)
    with Collectives() as found:
        run(**batch).loss.backward()
    return found.counts


@pytest.mark.parametrize(
    ("family", "built_with", "options", "steps"),
    [
        ("gpt2", {}, {}, traced),
        ("gpt2", {}, SP, traced),
        ("gpt2", {}, {}, fused_gelu),
        ("gpt2", {}, {}, recomputed_sdpa),
        ("llama", {}, {}, traced),
        ("llama", BIASED, SP, fused_gate),
    ],
)
@on_ranks(2)
def test_graphs_add_no_collective(rank, family, built_with, options, steps):
    wanted = collectives(family, built_with, options, None)
    assert sum(wanted.values()) >= 4 * 2
    assert collectives(family, built_with, options, steps) == wanted


def hidden_dropout(p: float) -> dict[str, Any]:
    return {**EAGER, "dropout": p, "use_cache": False}


@pytest.mark.parametrize("sequence_parallel", [False, True])
@on_ranks(2)
def test_recomputing_inside_a_random_stream_of_the_rank_changes_not_one_bit(rank, sequence_parallel):
    """Attention dropout draws from the rank's own stream; two steps show that it goes on from where it would."""
    found = {}
    for steps, seed in [(traced, 5), (recomputed_core, 5), (recomputed_core, 6)]:
        model = models.gpt2(layers=1, **hidden_dropout(0.3)).double()
        torch.manual_seed(seed)

        def schedule(sch: Schedule, *, steps: Steps = steps) -> None:
            find_schedule("gpt2")(sch, {"sequence_parallel": sequence_parallel})
            steps(sch)

        _, scheduled = initialize(model, schedule, tp=2)
        for step in range(2):
            loss = model(**models.batch(seed=step, padded=True)).loss
            loss.backward()
            found[steps, seed, step] = {**gradients(scheduled), "loss": loss.detach()}
    for step in range(2):
        for name, grad in found[traced, 5, step].items():
            assert torch.equal(found[recomputed_core, 5, step][name], grad), (step, name)
    # dropout was on
    assert not torch.equal(found[recomputed_core, 6, 0]["loss"], found[recomputed_core, 5, 0]["loss"])


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.drop, self.norm = nn.Linear(8, 8), nn.Dropout(0.5), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.drop(self.fc(x)) + x)


def drop_add_norm(x: Any, residual: Any) -> Any:
    return module("norm")(module("drop")(x) + residual)


@on_ranks(2)
def test_random_stream_of_a_grouped_dropout_is_the_ranks_own(rank):
    """Asked for after the fusion, it takes effect all the same: masks of the ranks differ."""

    def outputs(*, forked: bool) -> Tensor:
        torch.manual_seed(0)
        model = Feed()

        def schedule(sch: Schedule) -> None:
            sch.trace(inputs={"x": torch.zeros(2, 5, 8)})
            sch.fuse(sch.match(drop_add_norm), compiler=None)
            if forked:
                sch["drop"].fork_rng()

        run, _ = initialize(model, schedule, tp=2)
        torch.manual_seed(3)
        return run(torch.linspace(-1, 1, 320).view(4, 10, 8))

    mine = [outputs(forked=forked) for forked in (False, True)]
    everywhere: list[Any] = [None, None]
    torch.distributed.all_gather_object(everywhere, [each.detach() for each in mine])
    assert torch.equal(everywhere[0][0], everywhere[1][0])
    assert not torch.allclose(everywhere[0][1], everywhere[1][1])


# ------------------------------------------------------------------------------------------------------- DeepSpeed


def on_engine(stage: int, tp: int, family: str, built_with: dict[str, Any], schedule: Any) -> None:
    """3 steps of an engine against AdamW on the dense model, with padding masks."""
    dense = getattr(models, family)(layers=1, **built_with)
    model = copy.deepcopy(dense)
    settings = {"lr": 1e-3, "eps": 1e-5, "weight_decay": 0.1}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.1,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 5000, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": settings},
    }
    engine, *_ = on_deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config, schedule=schedule, tp=tp
    )
    optimizer = torch.optim.AdamW(dense.parameters(), **settings)
    dp, dp_rank = 2 // tp, torch.distributed.get_rank() // tp
    for step in range(3):
        whole = models.batch(size=2 * dp, seed=step, padded=True)
        parts = [{name: value[2 * i : 2 * i + 2] for name, value in whole.items()} for i in range(dp)]
        losses = [dense(**part).loss for part in parts]
        (sum(losses) / dp).backward()
        loss = engine(**parts[dp_rank]).loss
        close(loss.float(), losses[dp_rank], f"loss of step {step}", 1e-5)
        engine.backward(loss)
        engine.step()
        nn.utils.clip_grad_norm_(dense.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    full = on_deepspeed.consolidate(engine)
    for name, value in dense.state_dict().items():
        close(full[name], value, name, 1e-5)


def traced_and_fused(sch: Schedule) -> None:
    """Everything is traced, with a mask and without, before the engine takes the parameters away."""
    find_schedule("gpt2")(sch, {})
    traced(sch)
    fused_gelu(sch, "torchscript")
    recomputed_sdpa(sch)


@pytest.mark.parametrize(("stage", "tp"), [(1, 2), (3, 2), (3, 1)])
@on_ranks(2)
def test_deepspeed_trains_traced_and_fused_modules(rank, stage, tp):
    on_engine(stage, tp, "gpt2", {}, traced_and_fused)


@pytest.mark.parametrize(("stage", "tp"), [(1, 2), (3, 2)])
@on_ranks(2)
def test_deepspeed_trains_a_module_that_took_over_weights(rank, stage, tp):
    on_engine(stage, tp, "llama", {"use_cache": False}, replaced_qkv)
