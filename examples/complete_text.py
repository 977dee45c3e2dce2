"""Answers of a trained policy, here of the small model to problems in words (docs/how-to/small-model.md).

python examples/complete_text.py runs/small_llama "Tom has 3 apples and buys 4 more. How many apples does he have?"
"""

import sys

from tools.run import load_policy

if __name__ == "__main__":
    policy = load_policy(sys.argv[1])  # also RUN@best, or a directory in Hugging Face's form
    for answer in policy.generate(sys.argv[2:], temperature=0.0):
        print(answer)
