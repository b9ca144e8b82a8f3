"""`agreement` counts clear tokens alone, and a free answer up to its first unclear token."""

from benchmarks.questions.agreement import QUESTIONS, Agreement, Answer, compare


def test_only_clear_tokens_count_and_a_free_answer_ends_at_the_first_unclear_one() -> None:
    answer = Answer([1], [5, 6, 7, 8], [1.0, 1.0, 0.001, 1.0])
    same = {"forced": [5, 6, 9, 8], "free": [5, 6, 9, 9]}
    assert compare([answer], [same], 0.01) == Agreement(forced=(3, 3), free=(2, 2))
    assert compare([answer], [same], 0.01).is_complete
    other = {"forced": [5, 6, 7, 9], "free": [5]}
    assert compare([answer, answer], [same, other], 0.01) == Agreement(forced=(5, 6), free=(3, 4))


def test_there_are_60_questions() -> None:
    questions = QUESTIONS.read_text().splitlines()
    assert len(set(questions)) == 60 and all(questions)
