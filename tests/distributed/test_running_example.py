"""The running example on two ranks: loss and every gradient of the untouched model, in float64."""

import torch

import running_example as example
from partbook.core import build, create_schedule, gradients
from partbook.dialects.pytorch import make_mesh
from ranks import on_ranks


def step(model, batch):
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return loss


@on_ranks(2)
def test_two_ranks_compute_what_the_untouched_model_does(rank):
    untouched, sch = example.model(), create_schedule(example.model(), make_mesh(2))
    example.schedule(sch)
    assert sch["bert.encoder.layer.0.attention.self.qkv"].module.weight.shape == (48, 32)
    scheduled = build(sch)
    for batch in example.batches():
        torch.testing.assert_close(step(sch.module, batch), step(untouched, batch), rtol=0, atol=1e-12)
        found = gradients(scheduled)
        assert found.keys() == dict(untouched.named_parameters()).keys()
        for name, parameter in untouched.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad, rtol=0, atol=1e-12, msg=f"{rank} {name}")
    for training in (True, False):
        sch.module.train(training)
        untouched.train(training)
        for batch in example.batches():
            torch.testing.assert_close(sch.module(**batch).logits, untouched(**batch).logits, rtol=0, atol=1e-12)


@on_ranks(2)
def test_tracing_before_the_other_steps_changes_nothing(rank):
    """Trained and evaluated between the steps, so that graphs exist before the weights are split."""
    untouched, sch = example.model(), create_schedule(example.model(), make_mesh(2))
    batch = example.batches()[0]
    for attention in sch.find(example.ATTENTION):
        attention["self"].trace()
    for apply in (example.fuse_qkv, example.use_efficient_attention):
        for attention in sch.find(example.ATTENTION):
            apply(attention["self"])
        torch.testing.assert_close(step(sch.module, batch), step(untouched, batch), rtol=0, atol=1e-12)
    sch.module.zero_grad()
    for attention in sch.find(example.ATTENTION):
        example.split(attention)
    torch.testing.assert_close(step(sch.module, batch), step(untouched, batch), rtol=0, atol=1e-12)
    found = gradients(build(sch))
    for name, parameter in untouched.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=0, atol=1e-12, msg=f"{rank} {name}")


@on_ranks(2)
def test_missing_backward_sum_would_show(rank):
    """The loss is right, the gradients before the attention are not."""
    untouched, sch = example.model(), create_schedule(example.model(), make_mesh(2))
    example.schedule(sch, backward_sum=False)
    batch = example.batches()[0]
    torch.testing.assert_close(step(sch.module, batch), step(untouched, batch), rtol=0, atol=1e-12)
    name = "bert.embeddings.LayerNorm.weight"
    wrong = gradients(build(sch))[name] - untouched.get_parameter(name).grad
    assert wrong.abs().max() > 1e-6
