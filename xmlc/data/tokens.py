"""Texts as token ids: by the tokenizer that belongs to an encoder, once, and memory-mapped."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from xmlc.data.pretrained import first_line, quiet, transformers
from xmlc.data.reader.spool import Scratch
from xmlc.data.rows import TextColumn, TokenRows, offsets_of
from xmlc.data.store import Stored, cache_folder, digest_of, open_or_build
from xmlc.errors import ConfigError

_TEXTS_PER_BLOCK = 1024
_VOCABULARIES = ("tokenizer.json", "vocab.txt", "vocab.json", "*.model")


@dataclass(frozen=True, eq=False)
class TextTokenizer:
    """Texts to token ids, with the marks of begin and end that the encoder expects, cut to ``max_length``."""

    tokenizer: Any
    """A tokenizer of `transformers`."""
    max_length: int
    fingerprint: str
    """Of the encoder's folder."""

    @classmethod
    def load(cls, folder: Path, max_length: int, fingerprint: str) -> TextTokenizer:
        """Load the tokenizer of an encoder's folder, without the network and without code of the folder.

        Raises:
            ConfigError: There is none, it has no pad token, or ``max_length`` does not fit.
        """
        if not any(any(folder.glob(name)) for name in _VOCABULARIES):  # the library would make an empty one
            raise _no_tokenizer(folder, f"no file of {', '.join(_VOCABULARIES)}")
        try:
            with quiet():
                tokenizer = transformers().AutoTokenizer.from_pretrained(
                    str(folder), local_files_only=True, trust_remote_code=False
                )
        except Exception as error:  # whatever a folder that is none makes of the library
            raise _no_tokenizer(folder, f"{type(error).__name__}: {first_line(error)}") from None
        if tokenizer.pad_token_id is None:
            raise ConfigError(
                f"encoder.path: the tokenizer in {folder} must have a pad token, found none; "
                "set its pad_token and save it again"
            )
        marks = tokenizer.num_special_tokens_to_add()
        if max_length <= marks:
            raise ConfigError(
                f"encoder.max_length: must be above the {marks} tokens that mark a text's ends, found "
                f"{max_length}; raise it"
            )
        return cls(tokenizer, max_length, fingerprint)

    @property
    def pad(self) -> int:
        """The id that fills up a batch."""
        return int(self.tokenizer.pad_token_id)

    @property
    def vocabulary(self) -> int:
        """How many tokens it knows."""
        return len(self.tokenizer)

    def transform(self, texts: Iterable[str]) -> TokenRows:
        """Return the token ids of all texts; every text has at least one."""
        rows = [self._ids(block) for block in _blocks(texts)]
        lengths = np.array([len(row) for block in rows for row in block], np.int64)
        ids = np.fromiter(chain.from_iterable(chain.from_iterable(rows)), np.int32, int(lengths.sum()))
        return TokenRows(offsets_of(lengths), ids.astype(self.dtype))

    @property
    def dtype(self) -> type[np.uint16] | type[np.int32]:
        """The narrowest dtype that holds every id."""
        return np.uint16 if self.vocabulary <= 2**16 else np.int32

    def _ids(self, texts: list[str]) -> list[list[int]]:
        rows = self.tokenizer(
            texts,
            truncation=True,
            max_length=self.max_length,
            return_attention_mask=False,
            return_token_type_ids=False,
        )["input_ids"]
        return [row or [self.pad] for row in rows]  # a tokenizer without marks makes nothing of ""


def open_tokens(
    tokenizer: TextTokenizer,
    columns: Sequence[TextColumn],
    key: str,
    cache: Path | None = None,
) -> TokenRows:
    """Tokenise columns, one below the other, or open what an earlier call stored.

    Args:
        tokenizer: Its fingerprint and ``max_length`` are part of what the store is found by.
        columns: The texts.
        key: Names the texts: the data set's fingerprint, and which of its columns they are.
        cache: Folder of the stores; None takes `cache_folder`.

    Raises:
        DataError: The cache is not writable.
    """
    facts = {"texts": key, "encoder": tokenizer.fingerprint, "max_length": tokenizer.max_length}

    def build(folder: Path) -> Stored:
        with Scratch(folder) as scratch:
            offsets, ids = scratch.spool(np.int64), scratch.spool(tokenizer.dtype)
            offsets.append(np.zeros(1, np.int64))
            for block in _blocks(chain.from_iterable(columns)):
                rows = tokenizer.transform(block)
                offsets.append(rows.offsets[1:] + ids.size)
                ids.append(rows.ids)
            return Stored({"offsets": offsets.finish(), "ids": ids.finish()}, {})

    stored = open_or_build(cache or cache_folder(), f"tokens-{digest_of(facts)}", facts, build)
    return TokenRows(stored.arrays["offsets"], stored.arrays["ids"])


def _blocks(texts: Iterable[str]) -> Iterator[list[str]]:
    iterator = iter(texts)
    while block := list(islice(iterator, _TEXTS_PER_BLOCK)):
        yield block


def _no_tokenizer(folder: Path, found: str) -> ConfigError:
    return ConfigError(
        f"encoder.path: {folder} must hold the encoder's tokenizer, found {found}; save it there with "
        "`save_pretrained`"
    )
