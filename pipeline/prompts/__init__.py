"""Prompts: from rows of a data set to groups on the first stream.

In: a JSONL or parquet file, or a Hub data set. Out: `PromptGroup`s in a seeded order that a cursor
restores exactly. Nothing here samples tokens or holds a model; only the tokeniser's calls are used.

    Dataset.load -> rows -> Order.at(ordinal) -> PromptSource.next_group
"""

from pipeline.prompts.dataset import Dataset, Row
from pipeline.prompts.encoding import Encode, chat_encoder
from pipeline.prompts.order import CurriculumOrder, Order, PromptOrder
from pipeline.prompts.source import PromptSource, evaluation_groups, prompt_lengths
from pipeline.prompts.statistics import Coverage, PromptStatistics

__all__ = [
    "Coverage",
    "CurriculumOrder",
    "Dataset",
    "Encode",
    "Order",
    "PromptOrder",
    "PromptSource",
    "PromptStatistics",
    "Row",
    "chat_encoder",
    "evaluation_groups",
    "prompt_lengths",
]
