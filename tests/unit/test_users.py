"""The access file: its form, the errors in it, proofs, and decisions against a plain oracle."""

from __future__ import annotations

import hashlib
import itertools
import json
import pickle
import random
import time
from pathlib import Path
from typing import Any

import pytest

from shmq.users import (
    ACTS,
    BadAccessFile,
    Quota,
    Users,
    hash_password,
    hash_token,
    name_in,
    subject_text,
)

TOKEN = "0123456789abcdef"
OTHER = "fedcba9876543210"
PASSWORD = hash_password(b"correct horse")


def one(lines: str = "", proof: str = f'token = "{TOKEN}"') -> Users:
    """The file of one user."""
    return Users.parse(f"[users.a]\n{proof}\n{lines}")


# ---- decisions ----


def matches(glob: str, name: str) -> bool:
    """Whether a shell's pattern matches, by its definition."""
    if not glob:
        return not name
    if glob[0] == "*":
        return any(matches(glob[1:], name[at:]) for at in range(len(name) + 1))
    if glob[0] == "[":
        end = glob.index("]", 2 + (glob[1] == "!"))
        chosen, rest = glob[1:end], glob[end + 1 :]
        negated, chosen = chosen[0] == "!", chosen.removeprefix("!")
        return bool(name) and (name[0] in chosen) != negated and matches(rest, name[1:])
    return bool(name) and glob[0] in ("?", name[0]) and matches(glob[1:], name[1:])


def oracle(rules: list[dict[str, Any]], act: str, topic: str, channel: str) -> bool:
    """Whether a file grants this, by the words of its page."""
    for rule in rules:
        if act not in rule["do"] and "all" not in rule["do"]:
            continue
        topics, channels = rule.get("topics", ["*"]), rule.get("channels", ["*"])
        if act in ("publish", "stage"):
            channels = ["*"]
        if all(
            "*" in globs or (name and any(matches(glob, name) for glob in globs))
            for globs, name in ((topics, topic), (channels, channel))
        ):
            return True
    return False


def _pattern(rng: random.Random) -> str:
    parts = ["a", "b", "A", "-", ".", "*", "?", "[ab]", "[!a]", "ab", "**"]
    text = "".join(rng.choice(parts) for _ in range(rng.randint(1, 4)))
    return text + rng.choice(["", "", "#ephemeral"])


def _name(rng: random.Random) -> str:
    text = "".join(rng.choice("abAB-.") for _ in range(rng.randint(1, 4)))
    return text + rng.choice(["", "", "", "#ephemeral"])


def _rule(rng: random.Random) -> dict[str, Any]:
    rule: dict[str, Any] = {"do": rng.sample(list(ACTS), rng.randint(1, 3))}
    if rng.random() < 0.05:
        rule["do"] = ["all"]
    if rng.random() < 0.8:
        rule["topics"] = [_pattern(rng) for _ in range(rng.randint(1, 3))]
    plain = not {"publish", "stage", "all"} & set(rule["do"])
    if plain and rng.random() < 0.5:
        rule["channels"] = [_pattern(rng) for _ in range(rng.randint(1, 2))]
    return rule


def _toml(rules: list[dict[str, Any]]) -> str:
    words = []
    for rule in rules:
        parts = [f"{key} = {list(value)!r}" for key, value in rule.items()]
        words.append("{ " + ", ".join(parts) + " }")
    return f"allow = [ {', '.join(words)} ]"


@pytest.mark.parametrize("seed", range(40))
def test_random_rules_decide_as_the_oracle(seed: int) -> None:
    rng = random.Random(seed)
    rules = [_rule(rng) for _ in range(rng.randint(0, 4))]
    user = one(_toml(rules)).users["a"]
    names = ["", *(_name(rng) for _ in range(12))]
    granted = 0
    for act, topic, channel in itertools.product(ACTS, names, names):
        if channel and not topic:
            continue
        wanted = oracle(rules, act, topic, channel)
        assert user.may(act, topic, channel) == wanted, (rules, act, topic, channel)
        found, why = user.why(act, topic, channel)
        assert found == wanted
        assert ("grants it" in why) == wanted
        granted += wanted
        if wanted:
            assert user.may_some(act, topic)
    if not rules:
        assert not granted


def test_upper_and_lower_case_differ_and_a_whole_name_matches() -> None:
    user = one('allow = [{ do = ["publish"], topics = ["resize"] }]').users["a"]
    assert user.may("publish", "resize")
    for name in ("Resize", "resize2", "xresize", "resize#ephemeral", "resize\n", ""):
        assert not user.may("publish", name), name


def test_a_pattern_says_ephemeral_itself_or_by_a_star() -> None:
    user = one('allow = [{ do = ["publish"], topics = ["a#ephemeral", "b*"] }]').users["a"]
    assert user.may("publish", "a#ephemeral")
    assert not user.may("publish", "a")
    assert user.may("publish", "b#ephemeral")


def test_a_rule_with_channels_does_not_reach_the_topic() -> None:
    rule = '{ do = ["administer", "statistics"], topics = ["t"], channels = ["c"] }'
    user = one(f"allow = [{rule}]").users["a"]
    assert user.may("administer", "t", "c")
    assert not user.may("administer", "t")
    assert not user.may("administer", "t", "d")
    assert not user.may("administer")
    assert user.may_some("statistics", "t")
    assert not user.may_some("statistics", "u")


def test_the_instance_needs_a_rule_without_topics() -> None:
    for topics, whole in (("", True), (', topics = ["*"]', True), (', topics = ["a*"]', False)):
        user = one(f'allow = [{{ do = ["administer"]{topics} }}]').users["a"]
        assert user.may("administer") == whole


def test_a_pattern_cannot_run_away() -> None:
    user = one(f'allow = [{{ do = ["publish"], topics = ["{"a*" * 60}b"] }}]').users["a"]
    before = time.process_time()
    assert not user.may("publish", "a" * 64)
    assert time.process_time() - before < 1


# ---- proofs ----


def test_tokens_in_clear_and_hashed() -> None:
    for proof in (
        f'token = "{TOKEN}"',
        f'token = ["{OTHER}", "{TOKEN}"]',
        f'token_sha256 = ["{hash_token(TOKEN.encode())}"]',
        f'token_sha256 = "{hashlib.sha256(TOKEN.encode()).hexdigest().upper()}"',
    ):
        users = one(proof=proof)
        known = users.by_secret(TOKEN.encode())
        assert known is not None, proof
        assert known.user.name == "a"
        for wrong in (
            b"",
            b"x",
            TOKEN.encode() + b" ",
            TOKEN.encode()[:-1],
            b"a:" + TOKEN.encode(),
        ):
            assert users.by_secret(wrong) is None, wrong


def test_passwords() -> None:
    users = one(proof=f'password = "{PASSWORD}"')
    assert users.at_once(b"a:correct horse") is None  # not verified yet
    known = users.by_secret(b"a:correct horse")
    assert known is not None
    assert users.at_once(b"a:correct horse") == known
    for wrong in (b"a:wrong", b"b:correct horse", b"A:correct horse", b"a:", b":", b"a"):
        assert users.by_secret(wrong) is None
        assert users.at_once(wrong) is None
    assert name_in(b"a:correct horse") == "a"
    assert name_in(TOKEN.encode()) == ""


def test_a_password_may_hold_a_colon_and_any_bytes() -> None:
    users = one(proof=f'password = "{hash_password(b":" + bytes(range(1, 256)))}"')
    assert users.by_secret(b"a::" + bytes(range(1, 256))) is not None


def test_two_hashes_of_a_password_differ() -> None:
    assert hash_password(b"x") != hash_password(b"x")


SUBJECT = ((("countryName", "DE"),), (("organizationName", "Acme"),), (("commonName", "scanner"),))


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("CN=scanner,O=Acme,C=DE", True),
        ("cn = scanner , o=Acme, c=DE", True),
        ("C=DE,O=Acme,CN=scanner", True),
        ("commonName=scanner,organizationName=Acme,C=DE", True),
        ("CN=\\73canner,O=Acme,C=DE", True),
        ("CN=scanner", False),
        ("CN=scanner,O=Acme", False),
        ("CN=scanner,O=Acme,C=DE,OU=x", False),
        ("CN=Scanner,O=Acme,C=DE", False),
        ("CN=scanner,O=Acme+C=DE", True),
    ],
)
def test_subjects_of_certificates(text: str, same: bool) -> None:
    users = one(proof=f"certificate = ['{text}']")
    assert (users.by_certificate(SUBJECT) is not None) == same
    assert users.by_certificate(()) is None


def test_the_order_of_parts_of_one_name_counts() -> None:
    users = one(proof='certificate = "CN=x,DC=sub,DC=com"')
    there = ((("domainComponent", "com"),), (("domainComponent", "sub"),), (("commonName", "x"),))
    assert users.by_certificate(there) is not None
    assert users.by_certificate(there[::-1]) is None


@pytest.mark.parametrize(
    "value", ["scanner", "a,b", " a ", "#x", 'a"b;c<d>e', "a\\b", "a=b+c", "Straße", " "]
)
def test_a_subject_in_the_log_can_be_copied_into_the_file(value: str) -> None:
    subject = ((("countryName", "DE"),), (("commonName", value),))
    text = subject_text(subject)
    users = Users.parse(f"[users.a]\ncertificate = {json.dumps(text)}\nallow = []\n")
    assert users.by_certificate(subject) is not None


def test_a_subject_in_the_log_is_printable() -> None:
    assert subject_text(((("commonName", "a\x1b]0;b\n\u202e"),),)).isprintable()


def test_escapes_in_subjects() -> None:
    users = one(proof=r"""certificate = 'CN=a\,b\+c\"d,O=Stra\C3\9Fe'""")
    subject = ((("organizationName", "Straße"),), (("commonName", 'a,b+c"d'),))
    assert users.by_certificate(subject) is not None


def test_uids() -> None:
    users = one(proof='uid = [1000, "root"]')
    assert users.by_uid(0) is not None
    assert users.by_uid(1000) is not None
    assert users.by_uid(1001) is None
    assert users.by_uid(None) is None


def test_nobody_without_a_proof_unless_the_file_says_so() -> None:
    assert one().anonymous() is None
    users = Users.parse("[users.anonymous]\nallow = [{ do = ['statistics'] }]")
    known = users.anonymous()
    assert known is not None
    assert known.user.may("statistics")


def test_a_reload_keeps_who_brings_the_same_proof() -> None:
    users = one()
    known = users.by_token(TOKEN.encode())
    assert known is not None
    again = one("allow = [{ do = ['publish'] }]").again(known)
    assert again is not None
    assert again.user.may("publish", "t")
    assert one(proof=f'token = "{OTHER}"').again(known) is None
    taken_over = Users.parse(f'[users.b]\ntoken = "{TOKEN}"\n')
    assert taken_over.again(known) is None


# ---- errors name the place ----


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no user"),
        ("users = 5", "no user"),
        ("[users]", "no user"),
        ("[users.a", "it is no TOML"),
        ("[other]", "unknown key 'other'"),
        ("[users.a]\n", "users.a has no proof"),
        ("[users.'a b']\nuid=0", "users.a b"),
        ("[users.a]\ntokens = []", "users.a: unknown key 'tokens'"),
        ('[users.a]\ntoken = "short"', "users.a.token: a token must have at least 16"),
        (f'[users.a]\ntoken = ["{TOKEN}", "short"]', "users.a.token[1]"),
        ('[users.a]\ntoken = "with a space in it"', "users.a.token"),
        ('[users.a]\ntoken_sha256 = ["abc"]', "users.a.token_sha256[0]"),
        ("[users.a]\ntoken = []", "users.a.token is empty"),
        ('[users.a]\npassword = "plain"', "users.a.password: it must be a line of"),
        (f'[users.a]\npassword = "{PASSWORD.replace(":14:", ":18:")}"', "out of bounds"),
        (f'[users.a]\npassword = "{PASSWORD.replace(":14:8:", ":17:32:")}"', "out of bounds"),
        (f'[users.a]\npassword = "{PASSWORD.replace(":14:", ":1:")}"', "too low"),
        (f'[users.a]\npassword = ["{PASSWORD}", "{PASSWORD}"]', "one password"),
        ('[users.a]\ncertificate = "scanner"', "users.a.certificate: 'scanner' is no subject"),
        ('[users.a]\ncertificate = "CN="', "CN is empty"),
        ('[users.a]\nuid = "no-such-user-here"', "users.a.uid: 'no-such-user-here' is no user"),
        ("[users.a]\nuid = -1", "users.a.uid"),
        ("[users.a]\nuid = true", "users.a.uid"),
        ("[users.a]\nuid = 4294967296", "users.a.uid"),
        ("[users.anonymous]\nuid = 0", "users.anonymous.uid"),
        (
            f'[users.a]\ntoken = "{TOKEN}"\n[users.b]\ntoken_sha256 = '
            f'"{hashlib.sha256(TOKEN.encode()).hexdigest()}"',
            "users.b.token_sha256: users.a has the same token",
        ),
        ("[users.a]\nuid = 0\n[users.b]\nuid = 'root'", "users.a has the same uid"),
        ("[users.a]\nuid=0\nallow = 5", "users.a.allow must be a list"),
        ("[users.a]\nuid=0\nallow = [5]", "users.a.allow[0]"),
        ("[users.a]\nuid=0\nallow = [{}]", "users.a.allow[0] grants nothing"),
        ("[users.a]\nuid=0\nallow = [{ do = [] }]", "users.a.allow[0].do is empty"),
        ("[users.a]\nuid=0\nallow = [{ do = ['read'] }]", "allow[0].do[0]: there is no act 'read'"),
        ("[users.a]\nuid=0\nallow = [{ do = [[1]] }]", "users.a.allow[0].do[0]"),
        ("[users.a]\nuid=0\nallow = [{ do='publish', topic='x' }]", "unknown key 'topic'"),
        ("[users.a]\nuid=0\nallow = [{ do='publish', topics=[] }]", "allow[0].topics is empty"),
        ("[users.a]\nuid=0\nallow = [{ do='publish', topics=[''] }]", "allow[0].topics[0]"),
        ("[users.a]\nuid=0\nallow = [{ do='publish', topics='a b' }]", "is no pattern"),
        ("[users.a]\nuid=0\nallow = [{ do='publish', topics='a#b' }]", "can match no name"),
        ("[users.a]\nuid=0\nallow = [{ do='publish', topics='a[b' }]", "without its ]"),
        ("[users.a]\nuid=0\nallow = [{ do='publish', channels='c' }]", "concerns no channel"),
        ("[users.a]\nuid=0\nquota = { connection = 1 }", "users.a.quota: unknown key"),
        ("[users.a]\nuid=0\nquota = { connections = -1 }", "users.a.quota.connections"),
        ("[users.a]\nuid=0\nquota = { connections = true }", "users.a.quota.connections"),
        ("[users.a]\nuid=0\nquota = { messages_per_second = 0 }", "1 or more"),
        ("[users.a]\nuid=0\nquota = { staged_bytes = '64 apples' }", "users.a.quota.staged_bytes"),
        ("[users.a]\nuid=0\nquota = 5", "users.a.quota must be a table"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(text: str, said: str) -> None:
    with pytest.raises(BadAccessFile) as found:
        Users.parse(text)
    assert said in str(found.value)
    for secret in (TOKEN, PASSWORD, "short", "with a space in it"):
        assert secret not in str(found.value)


def test_quotas() -> None:
    users = one(
        "quota = { connections = 10, messages_per_second = 5000, staged_bytes = '64MiB', "
        "leases = 8, topics = 20 }"
    )
    assert users.users["a"].quota == Quota(10, 5000, 64 << 20, 8, 20)
    assert one("quota = { staged_bytes = 7 }").users["a"].quota == Quota(staged_bytes=7)
    assert one().users["a"].quota == Quota()


def test_nothing_shows_a_secret() -> None:
    users = one(proof=f'token = "{TOKEN}"\npassword = "{PASSWORD}"')
    known = [users.by_secret(TOKEN.encode()), users.by_secret(b"a:correct horse")]
    for shown in (repr(users), repr(users.users), repr(known), str(known[0].proof)):  # type: ignore[union-attr]
        for secret in (TOKEN, PASSWORD, hashlib.sha256(TOKEN.encode()).hexdigest(), "correct"):
            assert secret not in shown


def test_the_file_is_checked_and_an_error_names_it(tmp_path: Path) -> None:
    path = tmp_path / "access.toml"
    path.write_text(f'[users.a]\ntoken = "{TOKEN}"\n')
    path.chmod(0o600)
    assert Users.read(str(path)).by_token(TOKEN.encode()) is not None
    for mode in (0o644, 0o660, 0o602):
        path.chmod(mode)
        with pytest.raises(PermissionError):
            Users.read(str(path))
    path.chmod(0o600)
    path.write_text("[users.a]\n")
    with pytest.raises(BadAccessFile, match=r"access\.toml: users\.a has no proof"):
        Users.read(str(path))
    path.write_bytes(b"\xff")
    with pytest.raises(BadAccessFile, match="UTF-8"):
        Users.read(str(path))


def test_errors_are_value_errors_and_travel() -> None:
    assert issubclass(BadAccessFile, ValueError)
    assert str(pickle.loads(pickle.dumps(BadAccessFile("x")))) == "x"
