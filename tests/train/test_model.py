"""The model of a job: what each strategy trains, and where it starts."""

from __future__ import annotations

import pytest
import torch
from text_job import write_job

from dpfunc.train._config_file import read_job
from dpfunc.train._model import choose_parameters, load_base, load_processing

TRAINED = {
    ("text_classification", "head"): lambda name: name == "score.weight",
    ("text_classification", "bitfit"): lambda name: name.endswith("bias") or name == "score.weight",
    ("text_classification", "full"): lambda name: True,
    ("text_classification", "lora"): lambda name: "lora_" in name or "score.modules_to_save" in name,
    ("causal_lm", "lora"): lambda name: "lora_" in name,
    ("causal_lm", "bitfit"): lambda name: name.endswith("bias"),
    ("causal_lm", "full"): lambda name: True,
}


@pytest.mark.parametrize("case", TRAINED, ids="-".join)
def test_strategies_train_what_they_say(tmp_path, monkeypatch, case):
    task, strategy = case
    write_job(tmp_path, task, "gpt2")
    monkeypatch.chdir(tmp_path)
    job = read_job("job.yaml", ["--strategy", strategy])
    model = choose_parameters(load_base(job, load_processing(job)), job)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {name for name, _ in model.named_parameters() if TRAINED[case](name)}
    assert trained


def test_the_start_is_drawn_from_the_public_seed(tmp_path, monkeypatch):
    write_job(tmp_path)
    monkeypatch.chdir(tmp_path)

    def start(seed):
        job = read_job("job.yaml", ["--seed", str(seed)])
        model = choose_parameters(load_base(job, load_processing(job)), job)
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    torch.manual_seed(1)
    one = start(0)
    before = torch.get_rng_state()
    assert torch.equal(one, start(0))
    assert torch.equal(before, torch.get_rng_state())
    assert not torch.equal(one, start(1))
