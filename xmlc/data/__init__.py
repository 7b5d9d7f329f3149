"""Data sets: read from many formats, kept in memory-mapped stores, served in batches."""

from xmlc.data.batches import Batch, BatchStream, holdout
from xmlc.data.card import Card, find_card, list_cards
from xmlc.data.dataset import Dataset, Split
from xmlc.data.reader import DataWarning, IndexBase
from xmlc.data.rows import CsrRows, TextColumn, unit_length
from xmlc.data.store import cache_folder, open_dataset

__all__ = [
    "Batch",
    "BatchStream",
    "Card",
    "CsrRows",
    "DataWarning",
    "Dataset",
    "IndexBase",
    "Split",
    "TextColumn",
    "cache_folder",
    "find_card",
    "holdout",
    "list_cards",
    "open_dataset",
    "unit_length",
]
