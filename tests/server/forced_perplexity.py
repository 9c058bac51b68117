"""Print, as JSON, the logprobs of a text decoded token by token. Run as a process: SGLang's state is global.

python forced_perplexity.py TOKENS.json PROMPT_TOKENS [SGLang flags]
"""

import json
import sys
from pathlib import Path

from sglang_hybrid.integration.teacher_forcing import TeacherForcedDecode

if __name__ == "__main__":
    texts = json.loads(Path(sys.argv[1]).read_text())
    prompt_tokens = int(sys.argv[2])
    model = TeacherForcedDecode(sys.argv[3:])
    scores = [model.logprobs(text[:prompt_tokens], text[prompt_tokens:]).tolist() for text in texts]
    print("SCORES " + json.dumps(scores))
