"""A tokenizer of words, with the markers of chat templates where a test wants them."""

import contextlib
import io

from tokenizers import Tokenizer, models, pre_tokenizers, processors


def make(path, *markers, words=200, begins=True):
    """Write `tokenizer.json` for the words w0 … to `path`; `begins`: a text starts with `<s>`. Returns it."""
    vocabulary = {"<unk>": 0, "<s>": 1} | {f"w{n}": n + 10 for n in range(words)}
    for extra in ("user", "assistant", "system"):
        vocabulary[extra] = len(vocabulary) + 10
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(list(markers))
    if begins:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.redirect_stderr(io.StringIO()):
        tokenizer.save(str(path))
    return tokenizer
