"""instructor: objects of a class by tools, by JSON schema and while they stream."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import instructor
import pytest
from pydantic import BaseModel, Field

from duograph.tests.clients.conftest import MODEL
from duograph.tests.e2e.server_process import ServerProcess

MESSAGES: Any = [{"role": "user", "content": "Anna is 31 years old and happy."}]
MODES = [instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA]


class Address(BaseModel):
    city: str = Field(max_length=12)


class User(BaseModel):
    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=120)
    mood: Literal["happy", "sad"] | None
    addresses: list[Address] = Field(max_length=2)


@pytest.fixture(params=MODES, ids=lambda mode: str(mode.name))
def client(smol: ServerProcess, request: pytest.FixtureRequest) -> Iterator[instructor.Instructor]:
    with smol.client() as client:
        yield instructor.from_openai(client, mode=request.param)


def test_an_answer_is_an_object_at_the_first_try(client: instructor.Instructor) -> None:
    user, answer = client.chat.completions.create_with_completion(
        model=MODEL, messages=MESSAGES, response_model=User, max_retries=0, temperature=0
    )
    assert isinstance(user, User)
    assert answer.usage.completion_tokens > 0


def test_an_object_grows_while_it_streams(client: instructor.Instructor) -> None:
    seen = list(
        client.chat.completions.create_partial(
            model=MODEL, messages=MESSAGES, response_model=User, max_retries=0, temperature=0
        )
    )
    assert len(seen) > 3
    User.model_validate(seen[-1].model_dump())
