"""The machine behind a number."""

import os

from qjax.contrib.lab import machine

INFO = "processor\t: 0\ncpu family\t: {family}\nmodel\t\t: 17\nmodel name\t: AMD EPYC\n\nmodel name\t: other\n"


def test_cpus_of_one_name_are_told_apart() -> None:
    names = {machine._cpu(INFO.format(family=family)) for family in (25, 26)}
    assert names == {"AMD EPYC (family 25, model 17)", "AMD EPYC (family 26, model 17)"}


def test_what_is_not_known_is_left_out() -> None:
    assert machine._cpu("model name\t: Cortex\n") == "Cortex"
    assert machine._cpu("") == ""


def test_the_sentence_of_a_page() -> None:
    made = machine.made_on()
    assert made.startswith("Made on ")
    assert f"{os.cpu_count()} cores" in made
