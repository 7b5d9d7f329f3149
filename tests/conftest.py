"""What all tests share: the caches of the machine are left alone, and no example is timed."""

from collections.abc import Iterator

import pytest
from hypothesis import settings

settings.register_profile("untimed", deadline=None)  # a busy machine is no failure
settings.load_profile("untimed")


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the stores of data sets, also those of child processes, in a folder of this test run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XMLC_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
