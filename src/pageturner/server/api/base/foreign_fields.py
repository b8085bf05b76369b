"""Fields of other servers that would change what an answer may be, under names that are not ours.

Owns those names: a request that sends one means it, so it is refused rather than answered without
it. Must not know the fields that are understood (body.py).
"""

from __future__ import annotations

from typing import Any

# field -> values that change nothing and are taken, beside null
FOREIGN: dict[str, tuple[Any, ...]] = {
    # the form of the answer
    "regex": ("",),
    "ebnf": ("",),
    "structural_tag": ("",),
    "grammar_lazy": (False,),
    "grammar_triggers": ([],),
    "guided_whitespace_pattern": (),
    "ignore_eos_token": (False,),
    # how long it is, and where it ends
    "n_predict": (-1,),
    "num_predict": (-1,),
    "max_new_tokens": (),
    "min_new_tokens": (0,),
    "stop_regex": ("", []),
    "stop_sequences": ([],),
    "no_stop_trim": (False,),
    "t_max_predict_ms": (0, -1),
    # how tokens are chosen
    "samplers": ([], ""),
    "repeat_penalty": (1,),
    "repeat_last_n": (),
    "penalize_nl": (False,),
    "typical_p": (1,),
    "tfs_z": (1,),
    "top_a": (0,),
    "top_n_sigma": (-1, 0),
    "mirostat": (0,),
    "dynatemp_range": (0,),
    "xtc_probability": (0,),
    "dry_multiplier": (0,),
    "smoothing_factor": (0,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "penalty_alpha": (0,),
    "no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "guidance_scale": (1,),
    "negative_prompt": ("",),
    "watermark": (False,),
    "do_sample": (True,),
    "sampling_params": ({},),
    "custom_logit_processor": ("",),
    "logits_processors": ([],),
    "custom_params": ({},),
    # what else is told
    "logprob_token_ids": ([],),
    "token_ids_logprob": ([],),
    "n_probs": (0,),
    "top_n_tokens": (0,),
    "return_hidden_states": (False,),
    # what the model is given
    "lora_path": ("",),
    "lora": ([],),
    "adapter_id": ("",),
    "input_ids": ([],),
    "input_embeds": ([],),
    "prompt_embeds": ("", []),
    "image_data": ("", []),
    "mm_processor_kwargs": ({},),
    "web_search_options": (),
    # what becomes of the answer
    "store": (False,),
    "background": (False,),
}
# field -> what is said of it, where there is more to say than that it is not supported
FOREIGN_NAMES = {
    "regex": "not a field here: send structured_outputs with a regex",
    "ebnf": "not a field here: send structured_outputs with a grammar",
    "guided_whitespace_pattern": "not a field here: send structured_outputs with a whitespace_pattern",
    "n_predict": "not a field here: send max_tokens",
    "num_predict": "not a field here: send max_tokens",
    "max_new_tokens": "not a field here: send max_tokens",
    "min_new_tokens": "not a field here: send min_tokens",
    "stop_sequences": "not a field here: send stop",
    "do_sample": "not a field here: send temperature 0",
    "repeat_penalty": "not a field here: send repetition_penalty",
    "n_probs": "not a field here: send logprobs",
    "input_ids": "not a field here: send token ids as prompt to /v1/completions",
}
