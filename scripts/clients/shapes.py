"""Holds replies to the shapes that OpenAI publishes: the models of its own Python package, strictly.

As a module it gives clients a transport that looks at every reply that passes:

    openai.OpenAI(http_client=httpx.Client(transport=shapes.Transport()))

As a program it looks at replies that another client wrote down, a JSON object a line with `path`,
`status`, `type` and `body`:

    python shapes.py REPLIES
"""

import json
import sys
from collections import Counter

import httpx
import openai
from openai.types import Batch, Completion, FileDeleted, FileObject, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

EVENT = TypeAdapter(ResponseStreamEvent)
#: What Deltafin says beyond OpenAI's shapes, as docs/api.md promises; anything else is a slip.
OURS = {
    "choices.message.reasoning_content", "choices.delta.reasoning_content", "deltafin", "usage.deltafin",
    "response.usage.deltafin", "context_length", "max_model_len",
    # OpenAI's service says it, and its package does not know.
    "store", "response.store",
}
#: What OpenAI's service always says, though its package, which lives with other services too, would
#: not miss it: null where there is nothing to say.
ALWAYS = {
    "chat.completion": {
        "": ["id", "object", "created", "model", "choices", "usage", "system_fingerprint"],
        "choices": ["index", "message", "logprobs", "finish_reason"],
        "choices.message": ["role", "content", "refusal"],
        "usage": ["prompt_tokens_details", "completion_tokens_details"],
    },
    "chat.completion.chunk": {
        "": ["id", "object", "created", "model", "choices", "system_fingerprint"],
        "choices": ["index", "delta", "logprobs", "finish_reason"],
    },
    "text_completion": {
        "": ["id", "object", "created", "model", "choices", "system_fingerprint"],
        "choices": ["index", "text", "logprobs", "finish_reason"],
    },
    "response": {
        "": [
            "id", "object", "created_at", "status", "background", "error", "incomplete_details",
            "instructions", "max_output_tokens", "metadata", "model", "output", "parallel_tool_calls",
            "previous_response_id", "reasoning", "store", "temperature", "text", "tool_choice", "tools",
            "top_p", "truncation", "usage", "user",
        ],
    },
    "file": {"": ["id", "object", "bytes", "created_at", "filename", "purpose", "status"]},
    "batch": {
        "": [
            "id", "object", "endpoint", "errors", "input_file_id", "completion_window", "status",
            "output_file_id", "error_file_id", "created_at", "in_progress_at", "expires_at",
            "finalizing_at", "completed_at", "failed_at", "expired_at", "cancelling_at", "cancelled_at",
            "request_counts", "metadata",
        ],
    },
    "model": {"": ["id", "object", "created", "owned_by"]},
}
#: How many replies of each kind were looked at.
seen = Counter()


def reply(path, status, kind, body):
    """Looks at one whole reply."""
    path = path.split("?")[0]
    if not path.startswith("/v1/"):
        return
    if kind.startswith("text/event-stream"):
        stream(path, body)
    elif status >= 400:
        error(json.loads(body))
        seen["error"] += 1
    elif kind.startswith("application/json"):
        whole(path, json.loads(body))


def error(value):
    assert set(value) == {"error"}, value
    fields = value["error"]
    assert set(fields) == {"message", "type", "param", "code"}, fields
    assert isinstance(fields["message"], str) and isinstance(fields["type"], str), fields


def whole(path, value):
    shapes = {
        "chat.completion": ChatCompletion,
        "text_completion": Completion,
        "response": None if value.get("deleted") else Response,
        "model": Model,
        "file": FileDeleted if "deleted" in value else FileObject,
        "batch": Batch,
        "list": None,
    }
    shape = shapes[value["object"]]
    seen[value["object"]] += 1
    if value["object"] == "list":
        for item in value["data"]:
            if item.get("object"):
                whole(path, item)
        return
    if value["object"] == "text_completion":
        echo(value)
    if shape is not None:
        strictly(shape.model_validate, value)


def strictly(validate, value):
    said = json.dumps(value)[:4000]
    try:
        made = validate(value, strict=True)
    except Exception as wrong:
        raise AssertionError(f"{wrong}\n{said}") from None
    unknown = set(beyond(made, ())) - OURS
    assert not unknown, f"unknown to OpenAI: {sorted(unknown)}\n{said}"
    complete(value, said)
    # Events of a response carry it as it stands.
    if isinstance(value.get("response"), dict):
        complete(value["response"], said)


def beyond(made, path):
    """The paths of all fields that the models do not know, without the numbers of lists."""
    if isinstance(made, openai.BaseModel):
        for name in made.model_extra or ():
            yield ".".join((*path, name))
        for name in made.model_fields_set:
            # Names that Python keeps for itself have another in the model.
            yield from beyond(getattr(made, name), (*path, name))
    elif isinstance(made, list):
        for one in made:
            yield from beyond(one, path)


def complete(value, said):
    """Whether all is there that OpenAI's service always says."""
    if "deleted" in value:
        return
    for path, names in ALWAYS.get(value.get("object"), {}).items():
        places = [value]
        for step in path.split(".") if path else ():
            places = [place.get(step) for place in places if place.get(step) is not None]
            places = [one for p in places for one in (p if isinstance(p, list) else [p])]
        for place in places:
            missing = [name for name in names if name not in place]
            assert not missing, f"{value['object']} {path}: not said: {missing}\n{said}"


def echo(value):
    """Nothing comes before the first token of an echoed prompt. OpenAI's service says null, which
    its package's shape does not know."""
    for choice in value["choices"]:
        scores = choice["logprobs"]
        if scores and scores["token_logprobs"] and scores["token_logprobs"][0] is None:
            assert scores["top_logprobs"][0] is None
            scores["token_logprobs"][0], scores["top_logprobs"][0] = 0.0, {}


def stream(path, body):
    text = body if isinstance(body, str) else body.decode()
    events = []
    for block in text.split("\n\n"):
        for line in block.split("\n"):
            if line.startswith("data: "):
                events.append(line.removeprefix("data: "))
            else:
                assert line == "" or line.startswith((": ", "event: ")), line
    responses = path.startswith("/v1/responses")
    if not responses:
        assert events.pop() == "[DONE]", path
    for event in map(json.loads, events):
        if "error" in event and "object" not in event and not responses:
            error(event)
            continue
        seen["event of " + path.split("/")[2]] += 1
        if path == "/v1/chat/completions":
            strictly(ChatCompletionChunk.model_validate, event)
        elif path == "/v1/completions":
            # Of a choice that goes on, OpenAI's service says null here too.
            for choice in event["choices"]:
                if choice["finish_reason"] is None:
                    choice["finish_reason"] = "stop"
            echo(event)
            strictly(Completion.model_validate, event)
        elif responses:
            strictly(EVENT.validate_python, event)


class Tee(httpx.SyncByteStream):
    def __init__(self, inner, done):
        self.inner, self.done, self.body = inner, done, b""

    def __iter__(self):
        for chunk in self.inner:
            self.body += chunk
            yield chunk
        done, self.done = self.done, None
        if done:
            done(self.body)

    def close(self):
        # OpenAI's client leaves a stream at its last word. Who leaves before it got no whole reply.
        if self.done and self.body.rstrip().endswith(b"data: [DONE]"):
            done, self.done = self.done, None
            done(self.body)
        self.inner.close()


class Transport(httpx.BaseTransport):
    """Looks at every reply that is read to its end."""

    def __init__(self):
        self.inner = httpx.HTTPTransport()

    def handle_request(self, request):
        got = self.inner.handle_request(request)
        kind = got.headers.get("content-type", "")
        path, status = request.url.raw_path.decode(), got.status_code

        def done(body):
            reply(path, status, kind, body)

        got.stream = Tee(got.stream, done)
        return got

    def close(self):
        self.inner.close()


def main():
    with open(sys.argv[1]) as replies:
        for line in replies:
            one = json.loads(line)
            reply(one["path"], one["status"], one["type"], one["body"])
    assert seen, "no replies"
    print(f"shapes: ok, {dict(seen)}")


if __name__ == "__main__":
    main()
