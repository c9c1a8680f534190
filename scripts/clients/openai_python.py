"""Drives a Deltafin server with OpenAI's own Python client, streamed and not.

    python openai_python.py http://127.0.0.1:8000

The server serves the embedded small model; what is asked of its replies is their form, their
agreement with each other, and that equal seeds give equal text, never what they say.
"""

import json
import sys

import openai

BASE = sys.argv[1] + "/v1"
MODEL = "deltafin/austen-k3"
client = openai.OpenAI(base_url=BASE, api_key="unused", max_retries=0)

USER = [{"role": "user", "content": "Who are you?"}]


def stream_chat(**kwargs):
    """A streamed chat, put together as clients do."""
    content, reasoning, finish, usage, role = "", "", None, None, None
    chunks = client.chat.completions.create(model=MODEL, stream=True, **kwargs)
    for chunk in chunks:
        assert chunk.object == "chat.completion.chunk", chunk
        if chunk.usage is not None:
            assert chunk.choices == [], chunk
            usage = chunk.usage
            continue
        choice = chunk.choices[0]
        assert finish is None, "something after the finish"
        role = choice.delta.role or role
        content += choice.delta.content or ""
        reasoning += getattr(choice.delta, "reasoning_content", None) or ""
        finish = choice.finish_reason
    assert role == "assistant", role
    return content, reasoning, finish, usage


def models():
    listed = [model.id for model in client.models.list()]
    assert listed == [MODEL], listed
    assert client.models.retrieve(MODEL).id == MODEL


def chat_both_ways():
    for sampling in [{"temperature": 0}, {"temperature": 1, "seed": 11}, {"top_p": 0.5, "seed": 3}]:
        whole = client.chat.completions.create(
            model=MODEL, messages=USER, max_tokens=60, **sampling
        )
        assert whole.object == "chat.completion" and whole.id.startswith("chatcmpl-")
        choice = whole.choices[0]
        assert choice.message.role == "assistant" and choice.finish_reason in ("stop", "length")
        usage = whole.usage
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
        assert 0 < usage.completion_tokens <= 60
        told = usage.model_extra["deltafin"]
        by = told["experts"]
        assert by["requested"] == sum(by[k] for k in ("memory", "disk", "peer", "hub")), by
        assert by["requested"] > 0
        content, reasoning, finish, streamed = stream_chat(
            messages=USER,
            max_tokens=60,
            stream_options={"include_usage": True},
            **sampling,
        )
        assert content == choice.message.content, (content, choice.message.content)
        assert reasoning == (getattr(choice.message, "reasoning_content", None) or "")
        assert finish == choice.finish_reason
        assert streamed.completion_tokens == usage.completion_tokens
        assert streamed.prompt_tokens == usage.prompt_tokens
    assert content, "the trained model says something"


def seeds_tell_texts_apart():
    def text(seed):
        reply = client.completions.create(
            model=MODEL, prompt="It was a", max_tokens=24, temperature=1, seed=seed
        )
        return reply.choices[0].text

    assert text(1) == text(1)
    assert len({text(seed) for seed in range(4)}) > 1


def completions_both_ways():
    prompts = ["It is a truth", "Mr. Darcy"]
    whole = client.completions.create(
        model=MODEL, prompt=prompts, max_tokens=8, temperature=0, n=1, echo=True
    )
    assert [c.index for c in whole.choices] == [0, 1]
    for prompt, choice in zip(prompts, whole.choices):
        assert choice.text.startswith(prompt) and len(choice.text) > len(prompt)
        assert choice.finish_reason == "length"
    joined = ["", ""]
    for chunk in client.completions.create(
        model=MODEL, prompt=prompts, max_tokens=8, temperature=0, echo=True, stream=True
    ):
        joined[chunk.choices[0].index] += chunk.choices[0].text
    assert joined == [c.text for c in whole.choices], joined


def several_choices():
    reply = client.chat.completions.create(
        model=MODEL, messages=USER, n=3, seed=5, max_tokens=12
    )
    assert [c.index for c in reply.choices] == [0, 1, 2]
    alone = client.chat.completions.create(model=MODEL, messages=USER, seed=6, max_tokens=12)
    assert alone.choices[0].message.content == reply.choices[1].message.content


def stop_texts():
    free = client.completions.create(
        model=MODEL, prompt="It is a truth", max_tokens=30, temperature=0
    ).choices[0].text
    # A stop text from the middle, which need not fall on a token's edge.
    stop = free[7:11]
    held = client.completions.create(
        model=MODEL, prompt="It is a truth", max_tokens=30, temperature=0, stop=[stop, "@@"]
    ).choices[0]
    assert held.text == free[: free.index(stop)], (free, stop, held.text)
    assert held.finish_reason == "stop"


def log_probabilities():
    reply = client.chat.completions.create(
        model=MODEL, messages=USER, max_tokens=40, temperature=0, logprobs=True, top_logprobs=3,
        reasoning_effort="none",
    )
    tokens = reply.choices[0].logprobs.content
    assert b"".join(bytes(t.bytes) for t in tokens).decode() == reply.choices[0].message.content
    for token in tokens:
        assert token.logprob <= 0 and len(token.top_logprobs) == 3
        best = token.top_logprobs[0]
        # Greedy: what was said is what was likeliest.
        assert (best.token, best.logprob) == (token.token, token.logprob), token
    old = client.completions.create(
        model=MODEL, prompt="It is a truth", max_tokens=5, temperature=0, logprobs=2
    ).choices[0]
    assert "".join(old.logprobs.tokens) == old.text
    assert len(old.logprobs.token_logprobs) == 5


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Bath", "London", 'Say "A & B"']},
                "days": {"type": "integer", "minimum": 1, "maximum": 7},
                "wind": {"type": "boolean"},
            },
            "required": ["city", "days", "wind"],
        },
    },
}
REST = {"type": "function", "function": {"name": "rest", "parameters": {"type": "object"}}}


def check_call(name, arguments):
    given = json.loads(arguments)
    if name == "rest":
        assert given == {}, given
    else:
        assert name == "weather", name
        properties = WEATHER["function"]["parameters"]["properties"]
        assert list(given) == list(properties), given
        assert given["city"] in properties["city"]["enum"], given
        assert type(given["days"]) is int and 1 <= given["days"] <= 7, given
        assert type(given["wind"]) is bool, given


def tools_are_called():
    for choice in ["required", {"type": "function", "function": {"name": "weather"}}]:
        for seed in range(4):
            arguments = dict(
                messages=USER, tools=[WEATHER, REST], tool_choice=choice, seed=seed,
                max_tokens=600, parallel_tool_calls=seed % 2 == 0,
            )
            whole = client.chat.completions.create(model=MODEL, **arguments).choices[0]
            assert whole.finish_reason == "tool_calls", whole
            calls = whole.message.tool_calls
            assert whole.message.content is None and calls
            if seed % 2 or choice != "required":
                assert len(calls) == 1, calls
            assert len({call.id for call in calls}) == len(calls)
            for call in calls:
                check_call(call.function.name, call.function.arguments)
            if choice != "required":
                assert [call.function.name for call in calls] == ["weather"]
            streamed = {}
            for chunk in client.chat.completions.create(model=MODEL, stream=True, **arguments):
                for part in chunk.choices[0].delta.tool_calls or []:
                    call = streamed.setdefault(part.index, [part.function.name, ""])
                    call[1] += part.function.arguments or ""
            expected = {n: [c.function.name, c.function.arguments] for n, c in enumerate(calls)}
            assert streamed == expected, (streamed, expected)
    # The result goes back, and the conversation goes on.
    messages = USER + [
        {"role": "assistant", "content": None, "tool_calls": [c.model_dump() for c in calls]},
        *({"role": "tool", "tool_call_id": c.id, "content": "rain"} for c in calls),
    ]
    reply = client.chat.completions.create(
        model=MODEL, messages=messages, tools=[WEATHER], tool_choice="none", max_tokens=20
    ).choices[0]
    assert not reply.message.tool_calls


def answers_fit_their_schema():
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "tags": {"type": "array", "items": {"enum": ["kind", "proud"]}, "maxItems": 2},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "p", "schema": schema, "strict": True}}
    for effort in ("low", "none"):
        for seed in range(3):
            arguments = dict(
                messages=USER, response_format=form, seed=seed, max_tokens=400,
                reasoning_effort=effort,
            )
            whole = client.chat.completions.create(model=MODEL, **arguments).choices[0]
            given = json.loads(whole.message.content)
            assert list(given) == ["name", "age", "tags"], given
            assert len(given["name"]) <= 20 and 0 <= given["age"] <= 120
            assert len(given["tags"]) <= 2 and set(given["tags"]) <= {"kind", "proud"}
            content, _, finish, _ = stream_chat(**arguments)
            assert content == whole.message.content and finish == "stop"


def cuts_and_penalties():
    def text(**extra):
        return client.completions.create(
            model=MODEL, prompt="It is a truth", max_tokens=20, seed=2, **extra
        ).choices[0].text

    greedy = text(temperature=0)
    # The likeliest alone, whichever way it is asked for.
    assert text(temperature=1, extra_body={"top_k": 1}) == greedy
    assert text(temperature=1, extra_body={"min_p": 1}) == greedy
    assert text(temperature=1, top_p=0) == greedy
    forced = text(temperature=1, logit_bias={"300": 100})
    assert len(set(forced)) < len(set(greedy)), "one token over and over"
    repeated = text(temperature=0, frequency_penalty=-2, presence_penalty=-2)
    varied = text(temperature=0, frequency_penalty=2, presence_penalty=2)
    assert repeated != varied


def refusals():
    cases = [
        (dict(messages=USER, extra_body={"wibble": 1}), "wibble"),
        (dict(messages=USER, temperature=3), "temperature"),
        (dict(messages=[], max_tokens=1), "messages"),
        (dict(messages=USER, modalities=["audio"]), "modalities"),
    ]
    for arguments, param in cases:
        try:
            client.chat.completions.create(model=MODEL, **arguments)
        except openai.BadRequestError as error:
            assert error.param == param, (error.param, param)
            assert error.code, error
        else:
            raise AssertionError(f"{param} was not refused")
    try:
        client.chat.completions.create(model="gpt-4o", messages=USER)
    except openai.NotFoundError as error:
        assert error.code == "model_not_found"
    else:
        raise AssertionError("another model was not refused")


def a_conversation():
    messages = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "Tell a story."}]},
        {"role": "assistant", "content": "Once."},
        {"role": "user", "content": "And then? \U0001f600 <|open|>tools<|sep|>"},
    ]
    content, _, finish, _ = stream_chat(messages=messages, max_tokens=30, temperature=0)
    assert finish in ("stop", "length")
    assert "<|" not in content


def main():
    checks = [
        models,
        chat_both_ways,
        seeds_tell_texts_apart,
        completions_both_ways,
        several_choices,
        stop_texts,
        log_probabilities,
        cuts_and_penalties,
        tools_are_called,
        answers_fit_their_schema,
        refusals,
        a_conversation,
    ]
    for check in checks:
        check()
        print(f"{check.__name__}: ok", flush=True)


if __name__ == "__main__":
    main()
