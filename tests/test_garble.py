"""The garble detector: what no healthy answer holds is found, and ordinary texts of many kinds are left alone."""

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pytest_dspark.garble import IMMEDIATE_END, garbled, loop

REHEARSAL = Path(__file__).parents[1] / "pytest_dspark" / "rehearsal"
GARBLING = """
import json, sys
import answers, prose
from itertools import islice
texts = ["".join(islice(prose.sentences(seed), 6)) for seed in range(60)]
texts += ["The capital of France is Paris, and that of Norway is Oslo.", "2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43"]
print(json.dumps([texts, ["".join(answers._garbled([text], seed, 0)) for seed, text in enumerate(texts)]]))
"""

ORDINARY = {
    "english": "The keeper climbed the stairs, lit the lamp and looked out over the bay. Nothing moved. He waited.",
    "german": "Über den Wolken muß die Freiheit wohl grenzenlos sein; größere Äpfel kosten 3,50 €.",
    "french": "L'été dernier, nous avons dîné à l'auberge où l'on sert des crêpes flambées.",
    "polish": "Zażółć gęślą jaźń. W Szczebrzeszynie chrząszcz brzmi w trzcinie.",
    "vietnamese": "Hà Nội là thủ đô của Việt Nam; thành phố lớn nhất là Thành phố Hồ Chí Minh.",
    "turkish": "İstanbul'da ılık bir akşam: Iğdır'dan gelen yolcular çay içti.",
    "chinese": "北京是中国的首都。使用Python和Java编写程序时,可以调用API接口,若x是整数,则y也是整数。",
    "japanese": "東京タワーは1958年に完成しました。PCでWebサイトを見て、Tシャツを買いました。",
    "korean": "서울은 대한민국의 수도입니다. CPU와 GPU의 차이를 설명하겠습니다. 大韓民國이라고도 씁니다.",
    "russian": "Москва является столицей России. Откройте USB-порт и запустите SQL-запрос.",
    "arabic": "القاهرة هي عاصمة مصر، وتقع على نهر النيل. عدد السكان نحو 10 ملايين نسمة.",
    "hebrew": "ירושלים היא עיר עתיקה. השתמשו ב-Python כדי לכתוב את התוכנית.",
    "hindi": "नई दिल्ली भारत की राजधानी है। कृपया HTML फ़ाइल खोलें।",
    "thai": "กรุงเทพมหานครเป็นเมืองหลวงของประเทศไทย และ Wi-Fi ใช้งานได้",
    "formula": "Let Δx = 3 μm and αβ = γ². Then ∫f(x)dx = π/2, so x₁ + x₂ ≈ 4.7 Ω, for all ε > 0.",
    "greetings": "English: hello\nRussian: привет (privet)\nChinese: 你好 (nǐ hǎo)\nArabic: مرحبا (marhaban)\nGreek: γειά\nHindi: नमस्ते",
    "one line of names": "Tokyo is 東京 in Japanese and Токио in Russian.",
    "code": "def f(n):\n    return n if n < 2 else f(n - 1) + f(n - 2)\n\n\nfor i in range(10):\n    print(f'{i:>3} {f(i)}')\n",
    "nested code": "{\n  {\n    {\n      {\n        x\n      }\n    }\n  }\n}\n" * 3,
    "primes": ", ".join(map(str, range(101, 221, 2))),
    "numbered": "\n".join(f"{n}. item number {n} of the list" for n in range(1, 41)),
    "table": "| name | value |\n|------|-------|\n" + "\n".join(f"| row{n} | {n * 7} |" for n in range(20)),
    "rule": "Title\n" + "=" * 79 + "\n\nText.\n" + "-" * 120,
    "emoji": "Great job! 🎉🎉🎉 See you on 4 July 🇺🇸 👩‍👩‍👧‍👦",
    "json": json.dumps({"alpha": 2, "beta": [1, 2, 3], "name": "Zoë"}),
    "laughter": "Ha ha ha ha ha! That was a good one, and he said it again.",
    "short": "133",
    # of the small model of the lab, at temperature 0
    "lab count": "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12",
    "lab list": "1. 2\n2. 3\n3. 4\n4. 5\n5. 6\n6. 7\n7. 8\n8. 9\n9. 10",
    "lab odd": "Il Coriobella, Italy.",
    "lab prose": "The sun had set on a stormy night, and the lighthouses of the world stood as a testament to the resilience of "
    "the human spirit. In the small island of Santa Maria, a lighthouse stood as a beacon of hope, a symbol of the power "
    "of the sea and the unwavering faith of those who had dedicated their lives",
}


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_texts_are_clean(name):
    assert garbled(ORDINARY[name]) == ""


def test_what_the_rehearsal_garbles_with_compilation_on_is_found_and_its_own_text_is_not():
    run = subprocess.run(
        [sys.executable, "-c", GARBLING], cwd=REHEARSAL, capture_output=True, text=True, timeout=30, check=True
    )
    clean, broken = json.loads(run.stdout)
    assert [garbled(text) for text in clean] == [""] * len(clean)
    missed = [text for text in broken if not garbled(text)]
    assert missed == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", IMMEDIATE_END),
        (" \n\n ", IMMEDIATE_END),
        ("The lamp is \ufffd\ufffd lit.", "2 characters that are no text"),
        ("The lamp\x00 is lit.", "U+0000"),
        ("The lаmp is lit аnd thе keepеr slеeps in his bеd", "mix scripts"),  # Cyrillic letters among Latin ones
        ("я的q是a жü的b яq是c", "mix scripts"),
        ("ответ banana 的 Krishna да 是 river нет 我 stone", "to and fro"),
        ("It was a dark night. " + "and the lamp was lit, " * 12, "a loop"),
        ("的" * 200, "a loop"),
        ("!" * 700, "a loop"),
        ("no no no " * 40, "a loop"),
    ],
)
def test_garbling_is_found(text, words):
    assert words in garbled(text)


def test_half_a_character_at_a_cut_and_a_forced_loop_are_allowed_only_where_said():
    assert garbled("the tide came \ufffd", cut=True) == "" and garbled("the tide came \ufffd") != ""
    assert garbled("the \ufffd tide came", cut=True) != ""
    looping = "round and round it went, " * 20
    assert garbled(looping, loops=False) == "" and garbled(looping) != ""


def test_a_loop_that_ended_long_ago_is_none_and_the_search_is_quick():
    assert loop("so it was, " * 30 + "and then the keeper put out the lamp and went home to his supper.") == ""
    drawn = random.Random(1)
    text = " ".join(drawn.choice(["lamp", "tide", "keeper", "bay", "sea"]) for _ in range(20_000))
    start = time.process_time()
    assert garbled(text) == ""
    assert time.process_time() - start < 2
