"""The topic of a question, as a four-option task: `python tests/make_topics.py DATA OUT` reads DATA/opentrivia.jsonl.gz and
DATA/mmlu.jsonl.gz and writes OUT/trivia.jsonl and OUT/exams.jsonl, questions of both about the same four topics."""
import json
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from data import load_mcqa

TOPICS = {
    "history": ["history", "high_school_us_history", "high_school_world_history", "high_school_european_history", "prehistory"],
    "countries": ["geography", "high_school_geography"],
    "faith": ["religion-faith", "world_religions"],
    "science": ["science-technology", "astronomy", "high_school_physics", "conceptual_physics", "high_school_chemistry", "high_school_biology"]}


def main(data, out):
    Path(out).mkdir(parents=True, exist_ok=True)
    for source, name in (("opentrivia", "trivia"), ("mmlu", "exams")):
        rows = [row for row in load_mcqa(Path(data) / f"{source}.jsonl.gz") if len(row["question"]) <= 300]   # exams quote pages
        topics = {topic: [row for row in rows if row["subject"] in subjects] for topic, subjects in TOPICS.items()}
        each = min(map(len, topics.values()))              # as many of every topic
        chosen = [(topic, row) for topic, here in topics.items() for row in random.Random(0).sample(here, each)]
        with open(Path(out) / f"{name}.jsonl", "w", encoding="utf-8") as f:
            for topic, row in chosen:
                f.write(json.dumps({"question": f"Is the following quiz question about {', '.join(list(TOPICS)[:-1])} or {list(TOPICS)[-1]}?\n\n"
                                                f"{row['question']}", "choices": list(TOPICS), "answer": list(TOPICS).index(topic)}) + "\n")
        print(f"{out}/{name}.jsonl: {len(chosen)} questions")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
