"""Drives a Deltafin server with LangChain's ChatOpenAI: text, tools, structured output.

    python langchain_python.py http://127.0.0.1:8000
"""

import sys
from typing import Literal

import httpx
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, ConfigDict, Field

import shapes

http = httpx.Client(transport=shapes.Transport(), timeout=600)
llm = ChatOpenAI(
    base_url=sys.argv[1] + "/v1", api_key="none", model="deltafin/austen-k3", temperature=0, seed=1,
    max_retries=0, max_tokens=600, http_client=http, reasoning_effort="none",
)


@tool
def weather(city: Literal["Bath", "London"], days: int) -> str:
    """Tells the weather."""
    return f"{city}: rain for {days} days"


class Person(BaseModel):
    """A person of a novel."""

    # Else the schema allows any other field, and a small model never comes to an end.
    model_config = ConfigDict(extra="forbid")

    name: Literal["Emma", "Anne"]
    age: int = Field(ge=1, le=99)
    traits: list[Literal["kind", "proud"]] = Field(max_length=2)


def text():
    short = llm.bind(max_tokens=40)
    whole = short.invoke("Who are you?")
    streamed = "".join(chunk.text for chunk in short.stream("Who are you?"))
    assert whole.text and streamed == whole.text, (whole.text, streamed)
    assert whole.usage_metadata["output_tokens"] > 0


def tools():
    for stream in (False, True):
        bound = llm.bind_tools([weather], tool_choice="required", parallel_tool_calls=False)
        asked = [HumanMessage("How is the weather?")]
        if stream:
            message = None
            for chunk in bound.stream(asked):
                message = chunk if message is None else message + chunk
        else:
            message = bound.invoke(asked)
        (call,) = message.tool_calls
        assert call["name"] == "weather" and not message.invalid_tool_calls, message
        result = weather.invoke(call)
        assert isinstance(result, ToolMessage) and "rain" in result.content
        reply = llm.bind(max_tokens=8).invoke([*asked, message, result])
        assert reply.usage_metadata["input_tokens"] > 20


def structured_output():
    for method in ("json_schema", "function_calling"):
        person = llm.with_structured_output(Person, method=method).invoke("Who is she?")
        assert isinstance(person, Person), person


def main():
    for check in (text, tools, structured_output):
        check()
        print(f"{check.__name__}: ok", flush=True)
    print(f"shapes: ok, {dict(shapes.seen)}")


if __name__ == "__main__":
    main()
