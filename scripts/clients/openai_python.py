"""Drives a Deltafin server with OpenAI's own Python client, streamed and not.

    python openai_python.py http://127.0.0.1:8000

The server serves the embedded small model; what is asked of its replies is their form, their
agreement with each other, and that equal seeds give equal text, never what they say.
"""

import json
import os
import sys
import time

import httpx
import openai

import random_asks
import shapes

BASE = sys.argv[1] + "/v1"
MODEL = "deltafin/austen-k3"
http = httpx.Client(transport=shapes.Transport(), timeout=600)
client = openai.OpenAI(base_url=BASE, api_key="unused", max_retries=0, http_client=http)

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


def random_prompts_both_ways():
    random_asks.check(client, MODEL, int(os.environ.get("DELTAFIN_API_PROMPTS", "8")))


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


def an_echo_is_scored_as_its_tokens_were():
    """The scores of a prompt are those its tokens had when they were generated, to the bit."""
    made = client.completions.create(
        model=MODEL, prompt="It is a truth", max_tokens=12, temperature=0, logprobs=2, echo=True
    ).choices[0]
    assert made.logprobs.token_logprobs[0] is None
    assert "".join(made.logprobs.tokens) == made.text
    ids = len(made.logprobs.tokens)
    assert made.logprobs.text_offset[1] == len(made.logprobs.tokens[0])
    again = client.completions.create(
        model=MODEL, prompt=made.text, max_tokens=0, logprobs=2, echo=True
    )
    assert again.usage.completion_tokens == 0
    again = again.choices[0]
    # The text in tokens again need not be the tokens it was made of, but nearly always is.
    if again.logprobs.tokens == made.logprobs.tokens:
        assert again.logprobs.token_logprobs == made.logprobs.token_logprobs
        assert again.logprobs.top_logprobs == made.logprobs.top_logprobs
    streamed = []
    for chunk in client.completions.create(
        model=MODEL, prompt="It is a truth", max_tokens=12, temperature=0, logprobs=2, echo=True,
        stream=True,
    ):
        if chunk.choices[0].logprobs:
            streamed += chunk.choices[0].logprobs.token_logprobs
    assert streamed == made.logprobs.token_logprobs and len(streamed) == ids


def the_middle_of_a_text():
    """What a completion plugin of an editor asks."""
    for stream in (False, True):
        reply = client.completions.create(
            model=MODEL, prompt="def add(a, b):\n    return ", suffix="\n\nprint(add(1, 2))\n",
            max_tokens=24, temperature=0, stop=["\n\n"], stream=stream,
        )
        for chunk in reply if stream else [reply]:
            assert chunk.model_extra["deltafin"] == {"suffix": "chat"}
            assert chunk.object == "text_completion"


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


def responses_both_ways():
    ask = dict(model=MODEL, input="Who are you?", temperature=0, max_output_tokens=40)
    whole = client.responses.create(**ask)
    assert whole.status in ("completed", "incomplete") and whole.store
    text, last = "", None
    for event in client.responses.create(stream=True, **ask):
        if event.type == "response.output_text.delta":
            text += event.delta
        last = event
    assert last.type in ("response.completed", "response.incomplete"), last
    assert text == whole.output_text == last.response.output_text
    found = client.responses.retrieve(whole.id)
    assert found.output_text == whole.output_text and found.status == whole.status
    items = client.responses.input_items.list(whole.id)
    assert items.data[0].content[0].text == "Who are you?"
    again = client.responses.create(
        model=MODEL, input="And then?", previous_response_id=whole.id, max_output_tokens=8
    )
    assert again.usage.input_tokens > whole.usage.input_tokens + 5
    client.responses.delete(whole.id)
    try:
        client.responses.retrieve(whole.id)
    except openai.NotFoundError:
        pass
    else:
        raise AssertionError("deleted, and still there")


def responses_in_the_background():
    ask = dict(model=MODEL, input="Tell a story.", extra_body={"seed": 3}, max_output_tokens=40)
    plain = client.responses.create(**ask)
    made = client.responses.create(background=True, **ask)
    assert made.status in ("queued", "in_progress", "incomplete", "completed")
    while made.status in ("queued", "in_progress"):
        time.sleep(0.05)
        made = client.responses.retrieve(made.id)
    assert made.status == plain.status and made.output_text == plain.output_text
    # Streamed, left, and joined again where it was left.
    stream = client.responses.create(background=True, stream=True, **ask)
    head = []
    for event in stream:
        head.append(event)
        if len(head) == 4:
            break
    stream.close()
    id = head[0].response.id
    tail = list(
        client.responses.retrieve(id, stream=True, starting_after=head[-1].sequence_number)
    )
    numbers = [event.sequence_number for event in head + tail]
    assert numbers == list(range(len(numbers))), numbers
    assert tail[-1].response.output_text == plain.output_text
    # And one that is not wanted any more.
    made = client.responses.create(
        model=MODEL, input="Tell a very long story.", background=True, max_output_tokens=3000
    )
    assert client.responses.cancel(made.id).status == "cancelled"
    assert client.responses.retrieve(made.id).status == "cancelled"


def responses_call_tools_and_fit_schemas():
    tool = dict(WEATHER["function"], type="function", strict=False)
    made = client.responses.create(
        model=MODEL, input="Who are you?", tools=[tool], tool_choice="required", extra_body={"seed": 1},
        max_output_tokens=600, parallel_tool_calls=False,
    )
    calls = [item for item in made.output if item.type == "function_call"]
    assert len(calls) == 1
    check_call(calls[0].name, calls[0].arguments)
    result = {"type": "function_call_output", "call_id": calls[0].call_id, "output": "rain"}
    client.responses.create(
        model=MODEL, previous_response_id=made.id, input=[result], max_output_tokens=8
    )
    schema = {
        "type": "object", "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["age"], "additionalProperties": False,
    }
    form = {"format": {"type": "json_schema", "name": "p", "schema": schema, "strict": True}}
    made = client.responses.create(model=MODEL, input="Who?", text=form, max_output_tokens=400)
    assert 0 <= json.loads(made.output_text)["age"] <= 99


def files_and_batches():
    """A batch's answers are those that the same requests get alone."""
    asks = [
        dict(messages=USER, seed=n, max_tokens=12, temperature=1, reasoning_effort="none")
        for n in range(4)
    ]
    lines = [
        dict(custom_id=f"ask-{n}", method="POST", url="/v1/chat/completions",
             body=dict(ask, model=MODEL))
        for n, ask in enumerate(asks)
    ]
    lines.append(dict(lines[0], custom_id="bad", body=dict(messages=[])))
    text = "\n".join(json.dumps(line) for line in lines)
    file = client.files.create(file=("zwölf.jsonl", text.encode()), purpose="batch")
    assert file.filename == "zwölf.jsonl" and file.bytes == len(text.encode()), file
    assert client.files.content(file.id).text == text
    assert client.files.retrieve(file.id).model_dump() == file.model_dump()
    assert file.id in [listed.id for listed in client.files.list(purpose="batch", limit=1)]
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h",
        metadata={"for": "test"},
    )
    while batch.status not in ("completed", "failed", "cancelled"):
        time.sleep(0.05)
        batch = client.batches.retrieve(batch.id)
    assert batch.status == "completed" and batch.metadata == {"for": "test"}, batch
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (5, 4, 1), counts
    output = [json.loads(line) for line in client.files.content(batch.output_file_id).iter_lines()]
    assert [line["custom_id"] for line in output] == [f"ask-{n}" for n in range(4)]
    for ask, line in zip(asks, output):
        body = line["response"]["body"]
        shapes.whole("/v1/chat/completions", body)
        alone = client.chat.completions.create(model=MODEL, **ask)
        assert body["choices"][0]["message"]["content"] == alone.choices[0].message.content
    wrong = json.loads(client.files.content(batch.error_file_id).text)
    assert wrong["custom_id"] == "bad" and wrong["response"]["status_code"] == 400, wrong
    assert batch.id in [listed.id for listed in client.batches.list(limit=1)]
    # One that is not wanted any more.
    long = [
        dict(line, body=dict(line["body"], messages=[dict(USER[0], content="Tell a story.")],
                             max_tokens=3000, logit_bias={"300": 100}))
        for line in lines[:4]
    ]
    text = "\n".join(json.dumps(line) for line in long)
    many = client.files.create(file=text.encode(), purpose="batch")
    unwanted = client.batches.create(
        input_file_id=many.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    client.batches.cancel(unwanted.id)
    while unwanted.status != "cancelled":
        time.sleep(0.05)
        unwanted = client.batches.retrieve(unwanted.id)
    for id in (file.id, many.id, batch.output_file_id, batch.error_file_id):
        assert client.files.delete(id).deleted
    try:
        client.files.retrieve(file.id)
    except openai.NotFoundError:
        pass
    else:
        raise AssertionError("deleted, and still there")


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
        random_prompts_both_ways,
        seeds_tell_texts_apart,
        completions_both_ways,
        several_choices,
        stop_texts,
        log_probabilities,
        an_echo_is_scored_as_its_tokens_were,
        the_middle_of_a_text,
        cuts_and_penalties,
        tools_are_called,
        answers_fit_their_schema,
        responses_both_ways,
        responses_in_the_background,
        responses_call_tools_and_fit_schemas,
        files_and_batches,
        refusals,
        a_conversation,
    ]
    for check in checks:
        check()
        print(f"{check.__name__}: ok", flush=True)
    kinds = {"chat.completion", "text_completion", "response", "model", "list", "file", "batch", "error"}
    kinds |= {"event of chat", "event of completions", "event of responses"}
    assert set(shapes.seen) == kinds, (kinds, shapes.seen)
    print(f"shapes: ok, {dict(shapes.seen)}")


if __name__ == "__main__":
    main()
