"""No secret and no name of a person leaves in a report; what is needed to understand a failure stays."""

from __future__ import annotations

import string
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.redaction import redacted

SECRETS = st.text(string.ascii_letters + string.digits + "+/_-", min_size=12, max_size=40).filter(
    lambda s: not s.startswith("-") and s.strip("-_") and "removed" not in s
)
PLACES = [
    "HF_TOKEN={}", "export WANDB_API_KEY={}", "AWS_SECRET_ACCESS_KEY='{}'", 'DB_PASSWORD="{}"',
    '{{"password": "{}"}}', "{{'api_key': '{}'}}", "token = {}", "  passwd: {}", "--api-key {}",
    "--token={}", "curl -H 'Authorization: Bearer {}'", "authorization: Basic {}", "secret: {}, next: 1",
    "https://ada:{}@example.org/x", "https://x:{}@github.com/a/b.git", "GET /x?access_token={}&page=2",
    "https://s3/x?X-Amz-Signature={}", "client_secret={}", "MY_PRIVATE_KEY={}", "session_id={}",
]  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
@given(secret=SECRETS)
def test_what_is_named_like_a_secret_loses_its_value(place: str, secret: str) -> None:
    text = f"before\n{place.format(secret)}\nafter"
    safe = redacted(text)
    assert secret not in safe
    assert safe.startswith("before\n")
    assert safe.endswith("\nafter")
    assert "<removed>" in safe
    assert redacted(safe) == safe


@pytest.mark.parametrize(
    "token",
    [
        "hf_" + "aB3" * 12, "ghp_" + "x1Y" * 12, "github_pat_" + "a1_" * 12, "sk-proj-" + "a1b" * 12,
        "AKIA" + "A1B2" * 4, "xoxb-12345678-abcdef", "glpat-" + "abcd" * 5,
        "eyJhbGciOiJI.eyJzdWIiOiIx.SflKxwRJSM", "AIza" + "x" * 35,
    ],
)  # fmt: skip
def test_a_token_of_a_known_form_goes_wherever_it_stands(token: str) -> None:
    assert redacted(f"loaded with ({token}) from x") == "loaded with (<removed>) from x"


def test_a_private_key_goes_with_all_its_lines_even_when_its_end_is_cut_off() -> None:
    key = "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNz\nAAAA"
    assert redacted(f"a\n{key}") == "a\n<removed>"
    assert redacted(f"a\n{key}\n-----END OPENSSH PRIVATE KEY-----\nb") == "a\n<removed>\nb"


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ('File "/home/ada/work/train.py", line 3', 'File "~/work/train.py", line 3'),
        ("/root/venv/lib/x.py", "~/venv/lib/x.py"),
        ("/Users/ada/x and C:\\Users\\ada\\x", "~/x and ~\\x"),
        ("/data/root/x /mnt/rootfs", "/data/root/x /mnt/rootfs"),
        ("ada@laptop resumed; /scratch/ada/run-ada_1", "<user>@<host> resumed; /scratch/<user>/run-<user>_1"),
        ("Canada and adaptive stay", "Canada and adaptive stay"),
        ("10.1.2.6:22 gpubox.example.org gpubox", "<host>:22 <host> <host>"),
        ("127.0.0.1 torch 2.11.0 1.2.3", "127.0.0.1 torch 2.11.0 1.2.3"),
    ],
)
def test_homes_names_and_hosts_are_removed_and_their_neighbours_stay(text: str, safe: str) -> None:
    assert redacted(text, users=["ada"], hosts=["gpubox", "gpubox.example.org"]) == safe


def test_hosts_stay_when_they_are_wanted() -> None:
    assert redacted("ada@gpubox 10.1.2.6", hosts=None) == "ada@gpubox 10.1.2.6"


@pytest.mark.parametrize(
    "text",
    [
        "token_budget = 32768", "mask_token_id = 151669", "tokens: 371584500", "max_new_tokens = 12",
        "step 12 tau 3.41 tokens/s: 123", "KeyError: 'input_ids'", "key_states = torch.Size([1, 8])",
        "assert torch._C._is_key_in_tls(attr_name)", "tokens_per_s=1504.1", "eos_token: 2",
        "authors: [x]", "past_key_values: DynamicCache", "keyword = 3", "monkey: banana",
    ],
)  # fmt: skip
def test_words_of_the_field_are_no_secrets(text: str) -> None:
    assert redacted(text) == text


@pytest.mark.parametrize("word", ["a", "-", "ab.", "aGVsbG8", "1:", "tokenkey", "a--", "a@", "x://"])
def test_a_line_that_is_one_long_word_costs_no_more_than_another(word: str) -> None:
    text = (word * 8192)[:8192] + " HF_TOKEN=abcdefgh"
    begun = time.process_time()
    assert "abcdefgh" not in redacted(text)
    assert time.process_time() - begun < 6.0  # half a second; 15, where it grew with the square


@given(st.text())
def test_any_text_is_taken_and_a_second_time_changes_nothing(text: str) -> None:
    once = redacted(text, users=["ada"], hosts=["box"])
    assert redacted(once, users=["ada"], hosts=["box"]) == once
