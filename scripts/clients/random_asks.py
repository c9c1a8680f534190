"""Asks at random, with every feature: a stream's pieces join to the whole reply, to the character.

As a module: `check(client, model, count)`.
"""

import json
import random

LETTERS = "aeinorst   ,.?éüß中文字😀🏳️‍🌈\n\t\u200b<|>{}[]\"\\&"
#: Characters of several bytes each, which the tokens of the vocabulary cut in the middle.
WIDE = ["😀🏳️‍🌈", "中文字 — ß", "naïve…", "Ж\u0301ы😶‍🌫️", "\U0010fffd\u2028"]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {
                    "where": {"enum": WIDE + ["Bath"]},
                    "days": {"type": "integer", "minimum": 1, "maximum": 99},
                    "sure": {"type": "boolean"},
                },
                "required": ["where", "days", "sure"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("weather", "tides")
]
SCHEMA = {
    "type": "object",
    "properties": {
        "said": {"enum": WIDE},
        "to": {"type": "array", "items": {"enum": WIDE}, "minItems": 1, "maxItems": 3},
    },
    "required": ["said", "to"],
    "additionalProperties": False,
}
JSON = {"type": "json_schema", "json_schema": {"name": "s", "strict": True, "schema": SCHEMA}}
FEATURES = ["plain", "tools", "schema", "object", "several", "stop", "scores", "bias"]


def ask(dice, number):
    """An ask at random; each feature comes as often as the others."""
    prompt = "".join(dice.choice(LETTERS) for _ in range(dice.randint(1, 60))) + "?"
    made = dict(
        seed=number, max_tokens=dice.randint(1, 40), temperature=dice.choice([0, 0.7, 2]),
        top_p=dice.choice([1, 0.9]), reasoning_effort=dice.choice(["none", "low", "max"]),
        messages=[{"role": "user", "content": prompt}],
    )
    feature = FEATURES[number % len(FEATURES)]
    if feature == "tools":
        choice = dice.choice(["required", "auto", {"type": "function", "function": {"name": "tides"}}])
        made.update(tools=TOOLS, tool_choice=choice, parallel_tool_calls=dice.choice([True, False]))
    elif feature in ("schema", "object"):
        made["response_format"] = JSON if feature == "schema" else {"type": "json_object"}
    elif feature == "several":
        made["n"] = dice.randint(2, 3)
    elif feature == "stop":
        made["stop"] = dice.choice([["e"], [" t", "."], "an", ["\n", "the", ",", "I"]])
    elif feature == "scores":
        made.update(logprobs=True, top_logprobs=dice.randint(0, 3))
    elif feature == "bias":
        made.update(logit_bias={str(dice.randint(0, 255)): 5}, presence_penalty=1, frequency_penalty=-1)
    # A demand that is cut off by the limit ends in the middle, also of a character.
    if feature in ("tools", "schema") and dice.random() < 0.75:
        made["max_tokens"] = 600
    return feature, made


def said(choice):
    """What a choice of a whole reply says, without what is new in every reply."""
    message = choice.message
    calls = [[call.function.name, call.function.arguments] for call in message.tool_calls or []]
    scores = choice.logprobs.content if choice.logprobs else None
    return dict(
        content=message.content or "", calls=calls, finish=choice.finish_reason,
        reasoning=getattr(message, "reasoning_content", None) or "",
        scores=[score.model_dump() for score in scores or []],
    )


def joined(chunks):
    """The same, put together of a stream's pieces; and the pieces of text."""
    choices, pieces = {}, []
    for chunk in chunks:
        for choice in chunk.choices:
            one = choices.setdefault(
                choice.index, dict(content="", calls=[], finish=None, reasoning="", scores=[])
            )
            assert one["finish"] is None, "something after the finish"
            delta = choice.delta
            texts = [delta.content or "", getattr(delta, "reasoning_content", None) or ""]
            one["content"] += texts[0]
            one["reasoning"] += texts[1]
            for part in delta.tool_calls or []:
                if part.index == len(one["calls"]):
                    assert part.id and part.type == "function", part
                    one["calls"].append([part.function.name, ""])
                texts.append(part.function.arguments or "")
                one["calls"][part.index][1] += texts[-1]
            if choice.logprobs:
                one["scores"] += [score.model_dump() for score in choice.logprobs.content or []]
            one["finish"] = choice.finish_reason
            pieces += texts
    return choices, pieces


def check(client, model, count):
    dice = random.Random(7)
    for number in range(count):
        feature, made = ask(dice, number)
        whole = client.chat.completions.create(model=model, **made)
        whole = {choice.index: said(choice) for choice in whole.choices}
        streamed, pieces = joined(client.chat.completions.create(model=model, stream=True, **made))
        assert streamed == whole, (made, streamed, whole)
        if feature == "tools" and made["tool_choice"] != "auto" and made["max_tokens"] == 600:
            assert whole[0]["finish"] == "tool_calls", whole
            for _, arguments in whole[0]["calls"]:
                assert json.loads(arguments)["where"] in WIDE + ["Bath"], whole
        if feature == "schema" and made["max_tokens"] == 600 and whole[0]["finish"] == "stop":
            assert json.loads(whole[0]["content"])["said"] in WIDE, whole
            # All that was said is known: had a character been cut, its pieces would show.
            assert not any("\ufffd" in piece for piece in pieces), pieces
