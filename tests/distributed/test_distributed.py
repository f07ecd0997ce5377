"""Two processes against one: the operators on DTensors, the model sharded in every way, checkpoints, the example."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import limits
import pytest
import torch
import torch.distributed as dist
from processes import EXAMPLES, experts, patched, training
from processes.example import OPTIONS
from processes.outcomes import near, outcome, same_training
from processes.scenarios import MORE_PATCHED, MORE_RESUMING, MORE_TRAINING, PATCHED, RESUMING, SLOW, TRAINING

import foundry_kernels as fk
from foundry_kernels.models import ModelConfig, Transformer

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch without gloo")

# --- training ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return training.train(training.make_model())


def over(quick, more):
    """The quick scenarios and the slow ones, each in the processes of its kind."""
    return pytest.mark.parametrize("name", [*quick, *(pytest.param(name, marks=pytest.mark.slow) for name in more)])


@pytest.fixture
def by_name(request, name):
    return request.getfixturevalue("slow_results" if name in SLOW else "results")


@over(TRAINING, MORE_TRAINING)
def test_training_equals_that_of_one_process(name, by_name, alone):
    for result in outcome(by_name, name):
        same_training(result, alone)


BY_TWO_AND_FOUR = pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])


@pytest.fixture
def by_size(request, size):
    return request.getfixturevalue("results" if size == 2 else "results_of_four")


@BY_TWO_AND_FOUR
def test_gradients_of_query_and_key_norms_are_summed_over_the_devices(by_size):
    """Under FSDP2 too, of accumulated gradients."""
    alone = training.train(training.make_model(qk_norm=True))
    for result in outcome(by_size, "norms of heads"):
        same_training(result, alone)


@BY_TWO_AND_FOUR
def test_a_model_with_sharded_experts_trains_as_in_one_process(size, by_size):
    alone = training.train(training.make_model(**experts.FIELDS[size]))
    for result in outcome(by_size, "experts"):
        same_training(result, alone)


@BY_TWO_AND_FOUR
def test_sharded_experts_equal_those_of_one_process(by_size):
    """Also where a process has no tokens, or its experts get none."""
    for found in outcome(by_size, "mixtures of experts"):
        assert found.keys() == experts.MIXTURES.keys()
        for name, (actual, expected) in found.items():
            torch.testing.assert_close(actual, expected, msg=lambda text, name=name: f"{name}: {text}")


@pytest.fixture(scope="module")
def patched_llama() -> dict[str, Any]:
    pytest.importorskip("transformers")
    model = patched.make_llama()
    with fk.patch(model):
        return training.train(model, loss_of=patched.loss_of_llama)


@over(PATCHED, MORE_PATCHED)
def test_a_patched_llama_trains_as_in_one_process(name, by_name, patched_llama):
    """Sharded by torch's own means, with the patch in place; and afterwards the patch is taken back."""
    for result in outcome(by_name, name):
        same_training(result, patched_llama)
        assert result["collectives"], "nothing was sharded"
        near("logits without the patch", *result["logits"])
        assert not any("Foundry" in name for name in result["classes"])


def test_fully_sharded_mixed_precision(results):
    """Gradients are float32, and those of bfloat16 parameters in one process."""
    for result in outcome(results, "low precision"):
        assert {grad.dtype for grad in result["grads"].values()} == {torch.float32}
        for name, grad in result["expected"].items():
            near(name, result["grads"][name], grad)


def test_accumulation_exchanges_gradients_once_a_step(results):
    for kind, collective in (("ddp", "allreduce_"), ("fsdp", "_reduce_scatter")):
        once, twice = (outcome(results, name)[0]["collectives"] for name in (kind, f"{kind}, accumulated"))
        assert once[collective] == twice[collective] > 0


def test_tensor_parallel_collectives_are_those_of_the_plan(results):
    """Per block and direction two gathers and two scatters; around the blocks the embedding, the head, the logits. A
    loss without logits takes two small all-reduces instead of gathering them."""
    layers = training.make_model().config.n_layers
    expected = {"all_gather_into_tensor": 4 * layers + 3, "reduce_scatter_tensor": 4 * layers + 2}
    without = expected | {"all_gather_into_tensor": 4 * layers + 2, "all_reduce": 2}
    assert outcome(results, "step") == [{"logits": expected, "loss": without}] * 2


def test_other_choices_are_sharded_by_the_same_plan(results):
    for found in outcome(results, "choices"):
        assert found.keys() == training.SHARDED.keys()
        for name, (sharded, whole) in found.items():
            assert sharded.keys() == whole.keys()
            for key, expected in whole.items():
                if key.endswith("wk.bias"):  # it shifts all scores of a query alike: a gradient of 0, but for rounding
                    assert max(sharded[key].abs().max(), expected.abs().max()) < 1e-6, (name, key)
                else:
                    near(f"{name}: {key}", sharded[key], expected)


# --- operators --------------------------------------------------------------------------------------------------------


@over(["rules"], ["more rules"])
def test_operators_on_dtensors_equal_one_process_without_a_collective(name, by_name):
    from table import rows

    sharded = {row.id for row in rows() if row.op.sharding is not None and row.op.sharding.OPERATORS}
    for found in outcome(by_name, name):
        assert found["wrong"] == []
        assert found["collectives"] == {}
        assert found["tried"].keys() == sharded


def test_norm_under_sequence_parallelism_reduces_the_gradient_of_its_weight_and_nothing_else(results):
    for found in outcome(results, "norm"):
        for during, after, (split, partial) in found.values():
            assert during == {}
            assert after == {"all_reduce": 1}
            assert split
            assert partial


def test_sharded_attention_drops_what_the_whole_does(results):
    """Each device the weights of its own sequences and heads, and a mask that all share is on each."""
    for found in outcome(results, "attention"):
        assert len(found) >= 9
        for name, (collectives, sharded, whole) in found.items():
            assert collectives == {}, name
            for a, e in zip(sharded, whole, strict=True):
                near(name, a, e)


def test_a_loss_over_sharded_tokens_sums_two_or_three_numbers_over_the_devices(results):
    for found in outcome(results, "loss"):
        for id, (collectives, actual, expected) in found.items():
            numbers = 0 if "sum" in id else 3 if "z_loss" in id or "accuracy" in id else 2
            assert collectives == ({"all_reduce": numbers} if numbers else {}), id
            for a, e in zip(actual, expected, strict=True):
                torch.testing.assert_close(a, e, msg=lambda text, id=id: f"{id}: {text}")


def test_a_loss_over_sharded_classes_gathers_no_logits(results):
    """Two all-reduces forward, one more for predictions, and one of the gradient of hidden; where the tokens are
    sharded too, hidden is gathered and its gradient scattered."""
    for found in outcome(results, "vocabulary"):
        assert found.pop("refused") == "hidden must be a DTensor if weight is vocab-sharded; got a plain tensor"
        assert len(found) == 22
        for id, ((forward, backward), placed, actual, expected) in found.items():
            sharded = "S(1)" in id
            numbers = 3 if " tokens " in id else 2  # the third for predictions
            rows = 2 if {"all", "log-probs"} & set(id.split()) else 1  # of hidden, and of low
            assert forward == {"all_reduce": numbers} | ({"all_gather_into_tensor": rows} if sharded else {}), id
            assert backward == {"reduce_scatter_tensor" if sharded else "all_reduce": rows}, id
            assert placed, id
            error = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 2e-2}[id.split()[1]]
            for a, e in zip(actual, expected, strict=True):
                assert (a - e).abs().max() <= error * max(1e-3, float(e.abs().max())), id
            if " none " in id:  # a confident token's loss keeps its digits
                assert 0 < expected[0][0, 0] < 1e-4
                torch.testing.assert_close(actual[0].double(), expected[0], rtol=1e-4, atol=0.0)


@pytest.mark.slow
def test_a_loss_over_sharded_classes_in_one_graph(slow_results):
    """After losses on another mesh that is equal to theirs, which DTensor's cache answers with."""
    for found in outcome(slow_results, "compiled vocabulary"):
        assert found.keys() == {"all", "tokens", "mean"}
        for name, (plain, compiled) in found.items():
            for a, e in zip(compiled, plain, strict=True):
                error = 2**-7 if name == "mean" else 1e-6  # a rounding to bfloat16
                assert (a - e).abs().max() <= error * max(e.abs().max(), 1e-3), name


def test_a_patched_model_with_a_sharded_head_gathers_no_logits(results):
    pytest.importorskip("transformers")
    for found in outcome(results, "patched vocabulary"):
        _, none, loss, grads = found.pop("alone")
        assert none == {}
        for name, (logits, collectives, sharded_loss, sharded_grads) in found.items():
            assert logits is None
            gathered = {"all_gather_into_tensor": 1} if name == "sequence" else {}  # of hidden
            assert collectives == {"all_reduce": 2} | gathered, name
            near(name, sharded_loss, loss)
            for a, e in zip(sharded_grads, grads, strict=True):
                near(name, a, e)


def test_a_patched_model_with_transformers_own_plan_gathers_no_logits(results):
    """And the gradients of Qwen3's norms of queries and keys are summed over the devices, as the plan has it."""
    pytest.importorskip("transformers.distributed.tensor_parallel", reason="a transformers with plans of another kind")
    for found in outcome(results, "own plan"):
        assert len(found) == 4
        for name, ((none, collectives, actual), (_, _, expected)) in found.items():
            assert none, name
            assert collectives.keys() == {"all_reduce"}, name
            assert actual.keys() == expected.keys()
            for key, value in expected.items():
                near(f"{name}: {key}", actual[key], value)


def test_log_probabilities_of_a_sharded_model(results):
    """The values and gradients of one process. No logits are gathered, except by a head that only torch's own style
    shards, which must be called."""
    pytest.importorskip("transformers")
    for found in outcome(results, "log_probs"):
        none, expected = found.pop("alone")
        assert none == {}
        assert found.keys() >= {"fsdp", "ddp", "tp", "vocabulary"}
        for name, (collectives, actual) in found.items():
            assert actual.keys() == expected.keys()
            for key, value in expected.items():
                near(f"{name}: {key}", actual[key], value)
            if name == "vocabulary":
                assert collectives == {"all_reduce": 2}
            if name == "own plan":
                assert collectives.keys() == {"all_reduce"}


def test_mixtures_behave_as_torch_operations_do(results):
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(4, 6, generator=generator), torch.randn(6, generator=generator)
    expected = torch.nn.functional.rms_norm(x, (6,), weight, 1e-6)
    for found in outcome(results, "mixtures"):
        for name in ("native", "triton"):
            for value in found[name]:
                torch.testing.assert_close(value, expected)
        torch.testing.assert_close(found["vector"][0], fk.rms_norm(weight + weight))
        torch.testing.assert_close(found["vector"][1], fk.rms_norm(weight, weight))


@pytest.mark.slow
def test_compiled_operation_on_dtensors(slow_results):
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(4, 6, generator=generator).requires_grad_(), torch.randn(6, generator=generator)]
    leaves[1].requires_grad_()
    expected = fk.rms_norm(*leaves, backend="native")
    expected.sum().backward()
    for found in outcome(slow_results, "compiled"):
        torch.testing.assert_close(found["y"], expected)
        torch.testing.assert_close(found["grads"], [leaf.grad for leaf in leaves])


@pytest.mark.parametrize("name", ["weight", "teacher_weight", "bias"])
def test_distillation_refuses_sharded_classes(name, mesh_of_three):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    shapes = {"hidden": (3, 4), "weight": (6, 4), "teacher_hidden": (3, 5), "teacher_weight": (6, 5), "bias": (6,)}
    given = {
        each: distribute_tensor(torch.zeros(shape), mesh_of_three, [Shard(0) if each == name else Replicate()])
        for each, shape in shapes.items()
    }
    with pytest.raises(ValueError, match=f"^{name} must not be sharded by its classes"):
        fk.linear_kl_div(**given)


# --- the plan ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def mesh_of_three():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=3)
    yield dist.device_mesh.init_device_mesh("cpu", (3,))
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"dim": 16, "n_heads": 4}, "n_heads must be a multiple of the 3 devices that share the heads; got 4"),
        ({"dim": 24, "n_heads": 6, "n_kv_heads": 2}, "n_kv_heads must be a multiple of the 3 devices .* got 2"),
        ({"dim": 24, "n_heads": 6, "tie_embeddings": True}, "tie_embeddings=True is not sharded .* both ways"),
        ({"dim": 24, "n_heads": 6, "positions": "alibi"}, "positions='alibi' is not sharded by this plan: each device"),
        ({"dim": 24, "n_heads": 6, "positions": "sinusoidal"}, "positions='sinusoidal' is not sharded"),
        (
            {"dim": 24, "n_heads": 6, "qk_norm": True, "qk_norm_over": "projection"},
            "qk_norm_over='projection' is not sharded .* the norm is over the whole",
        ),
        ({"dim": 24, "n_heads": 6, "residual_dropout": 0.1}, "residual_dropout=0.1 is not sharded"),
        ({"dim": 24, "n_heads": 6, "attention_dropout": 0.1}, "attention_dropout=0.1 is not sharded .* heads by their"),
        ({"dim": 24, "n_heads": 6, "n_experts": 4}, "n_experts=4 is not sharded by this plan: experts"),
    ],
    ids=str,
)
def test_plan_refuses_what_cannot_be_sharded(shape, message, mesh_of_three):
    from foundry_kernels.distributed import tensor_parallel_plan

    model = Transformer(ModelConfig(n_layers=1, vocab_size=8, **shape))
    with pytest.raises(ValueError, match=message):
        tensor_parallel_plan(model, mesh_of_three)
    with pytest.raises(TypeError, match=r"model must be a foundry_kernels\.models\.Transformer; got Linear"):
        tensor_parallel_plan(torch.nn.Linear(2, 2), mesh_of_three)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda mesh: (None, mesh), TypeError, r"model must be a torch\.nn\.Module; got NoneType"),
        (lambda mesh: (torch.nn.Linear(2, 2), mesh), ValueError, r"must have a foundry_kernels\.nn\.MoE; Linear has"),
        (lambda mesh: (fk.nn.MoE(8, 8, 4, 2), mesh), ValueError, "n_experts of model must be a multiple of the 3 .* 4"),
        (lambda mesh: (fk.nn.MoE(8, 8, 6, 2), 3), TypeError, "mesh must be a torch.* got int"),
        (
            lambda mesh: (fk.nn.MoE(8, 8, 6, 2), dist.device_mesh.init_device_mesh("cpu", (1, 3))),
            ValueError,
            "mesh must have one dimension, that of expert parallelism; got 2",
        ),
        (
            lambda mesh: (fk.distributed.expert_parallel(fk.nn.MoE(8, 8, 6, 2), mesh), mesh),
            ValueError,
            "model must not be expert parallel yet; model is",
        ),
    ],
    ids=["no-module", "no-mixture", "experts", "no-mesh", "two-dimensions", "twice"],
)
def test_experts_that_cannot_be_sharded_are_refused(make, error, message, mesh_of_three):
    with pytest.raises(error, match=message):
        fk.distributed.expert_parallel(*make(mesh_of_three))


# --- the example ------------------------------------------------------------------------------------------------------


@over(RESUMING, MORE_RESUMING)
def test_run_is_resumed_by_another_number_of_processes(name, by_name, resumed):
    resumed(outcome(by_name, name)[0])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_health_of_a_sharded_run_is_that_of_the_whole(kind, tmp_path, script):
    """With spectral norms that are parameters; attention and activations are those of a part of the batch."""
    from examples.training import loop as train_loop
    from examples.training import text as train_text

    diagnosed = ["--diagnose-every", "3", "--sigma-reparam"]
    recipe = script.make_recipe(script.parse([*OPTIONS, *diagnosed]), 5)
    whole = train_loop.train(recipe, "auto", train_text.read_text(None, recipe.seq_len), None, progress=False)
    run_torchrun([*OPTIONS, *diagnosed, "--parallel", kind, "--out", str(tmp_path / "out")], tmp_path)
    found = list(train_loop.health_in(tmp_path / "out" / "log-auto.jsonl"))
    assert [step for step, _ in found] == whole.health.steps
    for (_, health), expected in zip(found, whole.health.healths, strict=True):
        for one, other in zip(health.layers, expected.layers, strict=True):
            assert one.name == other.name
            assert one.qk_rank == pytest.approx(other.qk_rank, rel=1e-4)
            for name in ("gradient_norm", "attention_gradient_norm", "feed_forward_gradient_norm"):
                assert getattr(one, name) == pytest.approx(getattr(other, name), rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fsdp", "tp", "cp"])
def test_torchrun(kind, tmp_path):
    pytest.importorskip("tqdm", reason="the example needs tqdm")
    done = run_torchrun([*OPTIONS, "--parallel", kind, "--out", str(tmp_path / "out")], tmp_path)
    assert done.stdout.count("On held-out text") == 1, "one process speaks for all"
    assert sorted(path.name for path in (tmp_path / "out" / "checkpoint-auto").iterdir()) == [
        ".metadata",
        "__0_0.distcp",
        "__1_0.distcp",
        "progress.pt",
    ]


def run_torchrun(options, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(EXAMPLES / "train.py"), *options]
    source = str(Path(fk.__file__).parent.parent)
    done = limits.run(command, cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": source})
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def test_example_accumulates(script):
    from examples.training import loop as train_loop
    from examples.training import text as train_text

    text = train_text.read_text(None, 16)
    runs = [
        train_loop.train(script.make_recipe(script.parse([*OPTIONS, *more]), 5), "auto", text, None, progress=False)
        for more in ([], ["--accumulate", "4"])
    ]
    assert runs[1].losses == pytest.approx(runs[0].losses, abs=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--parallel", "fsdp"], "--parallel fsdp needs processes that torchrun starts: torchrun --nproc-per-node 2"),
        (["--accumulate", "3"], "--batch must be a multiple of --accumulate 3; got 4"),
        (["--accumulate", "0"], "--accumulate must be at least 1; got 0"),
    ],
    ids=["no-torchrun", "accumulate", "accumulate-0"],
)
def test_example_refuses(arguments, message, script, monkeypatch, tmp_path, capsys):
    monkeypatch.delenv("RANK", raising=False)
    assert script.main([*OPTIONS, *arguments, "--out", str(tmp_path / "out")]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert message in line
    assert not (tmp_path / "out").exists()


def test_example_refuses_what_two_sizecannot_divide(results):
    for said in outcome(results, "refusals"):
        assert said == [
            "--parallel tp with 2 processes: n_heads must be a multiple of the 2 devices that share the heads; got 3",
            "--batch / --accumulate must be a multiple of the 2 processes; got 3",
            "--parallel cp with 2 processes: a sequence over 2 processes must have a multiple of 4 tokens; got 6",
        ]
