"""The loss of pairs of answers against its formulas in plain PyTorch, answer by answer, on every kind of mesh."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid

from ranvier.config.run import Preference
from ranvier.data.preference import PreferencePairs, PreferenceScoring, WithReference
from ranvier.data.token_samples import TokenSamples
from ranvier.mesh import Mesh
from ranvier.pipeline.microbatch import Microbatch
from ranvier.tensor.split.loss import IGNORED
from ranvier.tensor.split.preference_loss import PreferenceLoss
from ranvier.testing.reference import Reference
from tests.covering import without
from tests.errors import raises
from tests.tensor.split_parity import SEED, TOLERANCE, assemble, assert_close, gradients_of, on_mesh, share, tiny_gpt

PAIRS = 6
LOSSES = [Preference(), Preference(beta=0.5, label_smoothing=0.2), Preference(loss="ipo", beta=0.3),
          Preference(loss="simpo", beta=2.0, gamma=0.4)]
MESHES = [Mesh(), Mesh(data=2), Mesh(pipe=2), Mesh(row=2), Mesh(col=2), Mesh(data=2, pipe=2), Mesh(row=2, col=2)]
CASES = [*((mesh, LOSSES[0]) for mesh in MESHES),
         *((mesh, loss) for loss in LOSSES[1:] for mesh in (MESHES[0], MESHES[-1]))]


def answers_of(pair):
    """(tokens, which are learnt) of the chosen and the rejected answer; lengths differ between pairs."""
    g = torch.Generator().manual_seed(pair)
    prompt = torch.randint(0, 61, (1 + pair % 3,), generator=g)
    found = []
    for size in (1 + pair % 2, 3 - pair % 2):
        answer = torch.randint(0, 61, (size,), generator=g)
        found.append((torch.cat([prompt, answer]), torch.arange(len(prompt) + size) >= len(prompt)))
    return found


def pairs():
    answers = [answer for pair in range(PAIRS) for answer in answers_of(pair)]
    stops = np.cumsum([len(ids) for ids, _ in answers])
    starts = stops - [len(ids) for ids, _ in answers]
    found = WithReference(PreferencePairs(TokenSamples(
        torch.cat([ids for ids, _ in answers]).numpy(), starts, stops, 8,
        torch.cat([learnt for _, learnt in answers]).numpy())))
    found.reference = -np.random.default_rng(0).random((PAIRS, 2)) * 9
    return found


def model(settings):
    return replace(tiny_gpt(dropout=0.0), loss=PreferenceLoss(61, settings))


def formula(log_p, reference, sizes, settings):
    """One pair's loss by the papers' formulas. log_p, reference, sizes: of both answers."""
    ratio = log_p - reference
    match settings.loss:
        case "dpo":
            h, e = settings.beta * (ratio[0] - ratio[1]), settings.label_smoothing
            return -logsigmoid(h) * (1 - e) - logsigmoid(-h) * e
        case "ipo":
            return (ratio[0] / sizes[0] - ratio[1] / sizes[1] - 1 / (2 * settings.beta)) ** 2
        case "simpo":
            return -logsigmoid(settings.beta * (log_p[0] / sizes[0] - log_p[1] / sizes[1]) - settings.gamma)


def plain(settings, reference):
    """Loss, gradients and margins between rewards of one process that runs each answer separately."""
    plain_model = Reference(tiny_gpt(dropout=0.0), seed=SEED, dtype=torch.float64)
    total, margins = torch.zeros((), dtype=torch.float64), []
    for pair in range(PAIRS):
        log_p, sizes = [], []
        for ids, learnt in answers_of(pair):
            state = ids[None, :-1]
            for block in plain_model.modules.values():
                state = block(state)
            each = state[0].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
            log_p.append(each[learnt[1:]].sum())
            sizes.append(int(learnt[1:].sum()))
        log_p, sizes = torch.stack(log_p), torch.tensor(sizes)
        total = total + formula(log_p, reference[pair], sizes, settings)
        score = log_p - reference[pair] if settings.needs_reference else log_p
        score = score if settings.loss == "dpo" else score / sizes
        margins.append(float(settings.beta * (score[0] - score[1]).detach()))
    (total / PAIRS).backward()
    return float(total.detach()) / PAIRS, plain_model.gradients(), margins


def batches(data, replicas, micro):
    numbers = np.arange(PAIRS).reshape(replicas, -1)
    return [[Microbatch(data.inputs(own, own), data.targets(own), torch.from_numpy(own)) for own in
             np.split(mine, range(micro, len(mine), micro))] for mine in numbers]


@pytest.mark.parametrize(("mesh", "settings"), without([
    (mesh, loss) for mesh, loss in CASES if mesh.row * mesh.col == 4 and loss.loss != "ipo"], CASES),
                         ids=[f"{mesh}-{loss.loss}-{loss.beta}" for mesh, loss in CASES])
def test_loss_and_gradients_are_those_of_the_formula(mesh, settings):
    data = pairs()
    loss, expected, margins = plain(settings, torch.from_numpy(data.reference))

    def work(engine):
        mine, scoring = share(engine, batches(data, mesh.data, PAIRS // mesh.data // (2 if mesh.row == 1 else 1))), \
            PreferenceScoring(settings)
        seen = engine.evaluate(mine, lambda place, output: scoring.add(output, mine[place].targets,
                                                                       mine[place].samples))
        result = engine.forward_backward(mine)
        part = scoring.part() if engine.is_last_stage and engine.coordinates.col == 0 else None
        return gradients_of(engine), result, seen, part, engine.layout

    gradients, results, evaluations, parts, layouts = zip(*on_mesh(lambda: model(settings), mesh, work), strict=True)
    assert_close(assemble(gradients, layouts[0]), expected)
    norm = sum(float((gradient ** 2).sum()) for gradient in expected.values()) ** 0.5
    for result, seen in zip(results, evaluations, strict=True):
        assert result.weight == seen.weight == PAIRS
        assert abs(result.loss - loss) < TOLERANCE and abs(seen.loss - loss) < TOLERANCE
        assert abs(result.grad_norm - norm) < TOLERANCE * norm
    scores = PreferenceScoring(settings).total([part for part in parts if part is not None])
    assert scores["eval_count"] == PAIRS
    assert scores["eval_accuracy"] == np.mean(np.array(margins) > 0)
    assert abs(scores["eval_reward_margin"] - np.mean(margins)) < TOLERANCE


def test_pairs_that_fill_up_a_row_do_not_count():
    data, settings = pairs(), Preference()
    logits = torch.randn(2, 8, 61, dtype=torch.float64)
    targets = data.targets(np.array([0, 1]))
    filled = {name: torch.cat([tensor[:1], torch.full_like(tensor[1:], IGNORED)]) for name, tensor in targets.items()}
    alone = {name: tensor[:1] for name, tensor in targets.items()}
    loss = PreferenceLoss(61, settings)
    (total, count), (expected, _) = loss(logits, filled), loss(logits[:1], alone)
    assert int(count) == 1 and torch.equal(total, expected)


def test_targets_without_a_reference_are_refused():
    data = pairs()
    data.reference = None
    with raises("targets-of-pairs", "simpo", value=["rejected_from", "tokens"]):
        PreferenceLoss(61, Preference())(torch.zeros(1, 8, 61), data.targets(np.array([0])))
