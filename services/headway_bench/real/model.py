"""A model that nobody has to download: a random Llama of a few million weights, its tokenizer trained on the spot."""

import json
import string
from pathlib import Path
from typing import Any, Final

from headway_sim.filler import filler_text

__all__ = ["CONTEXT_TOKENS", "write_model"]

CONTEXT_TOKENS: Final = 8192
_VOCABULARY: Final = 2048
_TRAINING_TOKENS: Final = 1 << 14
_UNKNOWN, _BEGIN, _END = "<unk>", "<|im_start|>", "<|im_end|>"
_CHATML: Final = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_model(folder: Path) -> Any:  # tokenizers.Tokenizer, which ships no types
    """Write configuration and tokenizer as `transformers` reads them, without weights; returns the tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = {token: tokenizer.token_to_id(token) for token in (_UNKNOWN, _BEGIN, _END)}
    model = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": _VOCABULARY,
        "max_position_embeddings": CONTEXT_TOKENS,
        "bos_token_id": ids[_BEGIN],
        "eos_token_id": ids[_END],
        "torch_dtype": "bfloat16",
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": _UNKNOWN,
        "eos_token": _END,
        "chat_template": _CHATML,
        "clean_up_tokenization_spaces": False,
    }
    for name, content in (("config.json", model), ("tokenizer_config.json", tokenizer_config)):
        (folder / name).write_text(json.dumps(content, indent=1))
    return tokenizer


def _tokenizer() -> Any:
    # Only here: an extra, which the other benchmarks do not need.
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(unk_token=_UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=[_UNKNOWN, _BEGIN, _END],
        initial_alphabet=list(string.printable),
        show_progress=False,
    )
    tokenizer.train_from_iterator([filler_text(0, 0, _TRAINING_TOKENS)], trainer)
    if tokenizer.get_vocab_size() != _VOCABULARY:
        raise RuntimeError("the tokenizer did not come out as large as the model expects")
    return tokenizer
