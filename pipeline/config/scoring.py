"""Settings of what scores a group: reward functions, teachers, judges."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from pipeline.config.base import Count, Natural, NonNegative, PositiveFactor, Seconds, Section, SignedFactor


class RewardSettings(Section):
    """One reward function."""

    function: str = Field(
        description='Import path "package.module:function", a file "reward.py:function", or a shipped name.'
    )
    weight: SignedFactor = Field(1.0, description="Factor in the sum of all rewards.")
    timeout_s: Seconds = Field(30.0, description="A call that takes longer is stopped and counted as a time-out.")
    name: str = Field("", description="Name in metrics and records; defaults to the function's.")
    kwargs: dict[str, str | int | float | bool | list[str]] = Field({}, description="Passed to every call by name.")


class ModelAtWork(Section):
    """A model that scores, in this process or behind a server."""

    name: str = Field("", description="Name in metrics, records and the data; defaults to the last part of `model`.")
    model: str = Field("", description="Directory or Hub id; with `url` the name under which the server has it.")
    url: str = Field(
        "", description="An OpenAI-compatible server, for example http://gpu1:8000; empty loads the model here."
    )
    api_key_env: str = Field(
        "OPENAI_API_KEY", description="Name of the environment variable that holds the server's API key."
    )
    timeout_s: Seconds = Field(60.0, description="A request to the server that takes longer is made again.")
    max_concurrency: Count = Field(16, description="Requests to the server that are under way at once.")
    device: str = Field(
        "auto", description='Without `url`: "auto" takes a GPU when there is one; else "cpu", "cuda:0".'
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Without `url`; auto: bfloat16 on GPU, float32 on CPU."
    )
    batch_tokens: Count = Field(16384, description="Without `url`: padded tokens in one forward pass.")
    trust_remote_code: bool = Field(False, description="Runs code that comes with the model.")

    @property
    def title(self) -> str:
        """What it is called."""
        return self.name or self.model.rstrip("/").rpartition("/")[2] or "default"


class TeacherSettings(ModelAtWork):
    """One teacher, whose logprobs of the sampled tokens the policy is to come near."""

    weight: PositiveFactor = Field(1.0, description="Where several teach a row: share of its divergence in the sum.")
    top_k: Natural = Field(
        0,
        description="Likeliest ids at each token that travel with their logprobs, for algorithm.jsd_coef; 0 sends the "
        "sampled token's logprob alone.",
    )


class JudgeSettings(ModelAtWork):
    """One judge: a sequence classifier (a reward model), or with `url` a language model that is asked."""

    weight: SignedFactor = Field(1.0, description="Factor in the sum of all rewards.")
    prompt: str = Field(
        "",
        description="With `url`: file with the question, a Jinja template of `prompt`, `completion` and the columns of "
        "the data; empty asks for a score of the answer.",
    )
    min_score: SignedFactor = Field(
        0.0, description="With `url`: the score that is the reward 0; a lower one is an error."
    )
    max_score: SignedFactor = Field(
        10.0, description="With `url`: the score that is the reward 1; a higher one is an error."
    )
    max_tokens: Count = Field(512, description="With `url`: limit of the judge's answer.")
    temperature: NonNegative = Field(0.0, description="With `url`: of the judge; 0 is greedy.")
    cache: str = Field(
        "", description="With `url`: file that keeps scores from one run to the next; empty keeps them while it works."
    )

    @model_validator(mode="after")
    def _scores_differ(self) -> JudgeSettings:
        if self.min_score >= self.max_score:
            raise ValueError(f"min_score = {self.min_score:g} is not below max_score = {self.max_score:g}")
        return self


class ScoringSettings(Section):
    """Rewards, teachers and judges: each a stage of its own."""

    rewards: list[RewardSettings] = Field([], description="Reward functions; their weighted sum is the reward.")
    num_processes: Count = Field(2, description="Calls that run at once in one scorer, each in a process of its own.")
    on_failure: Literal["unscored", "zero"] = Field(
        "unscored",
        description="A completion whose reward failed or timed out: leave it out of its group, or reward 0.",
    )
    teachers: list[TeacherSettings] = Field(
        [], description="Models to learn from token by token (algorithm.distillation_coef, algorithm.jsd_coef)."
    )
    teacher_column: str = Field(
        "",
        description="Column of the data with the name of the row's teacher; empty lets all of them teach every row.",
    )
    judges: list[JudgeSettings] = Field([], description="Models that reward completions, added to the functions.")

    @property
    def has_models(self) -> bool:
        """Whether there is anything to score by besides functions."""
        return bool(self.teachers or self.judges)
