"""No key is written twice in a shipped configuration: the last one would count, and the reader would not see it."""

from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[3]
FILES = sorted([*ROOT.glob("*.yml"), *(ROOT / "deploy").rglob("*.yaml"), *(ROOT / "docs").rglob("*.yaml")])


class OnceLoader(yaml.SafeLoader):
    pass


def once(loader, node, deep=False):
    keys = [key.value for key, _ in node.value]  # all of them are plain strings
    repeated = {key for key in keys if keys.count(key) > 1}
    if repeated:
        raise yaml.constructor.ConstructorError(None, None, f"twice: {repeated}", node.start_mark)
    return loader.construct_mapping(node, deep)


OnceLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, once)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_no_key_is_there_twice(file):
    for document in yaml.load_all(file.read_text(), OnceLoader):
        assert document


def test_a_repeated_key_is_noticed():
    with pytest.raises(yaml.constructor.ConstructorError, match="twice"):
        yaml.load("a: {b: 1, b: 2}", OnceLoader)
