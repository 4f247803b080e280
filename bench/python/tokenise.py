"""Python's side of `cargo xtask bench corpus`: a .jsonl to token ids on disk with the package `tokenizers`.

    tokenise.py TOKENIZER.json INPUT.jsonl OUT.bin

Writes the ids of every document as u16, each document followed by <|endoftext|>, and prints the seconds that it took
from opening the tokenizer.json to the synced file.
"""

import json
import os
import sys
import time
from itertools import islice

import numpy as np
from tokenizers import Tokenizer

BATCH = 2000

tokenizer_path, input_path, out_path = sys.argv[1:]
start = time.perf_counter()
tokenizer = Tokenizer.from_file(tokenizer_path)
tokenizer.encode_special_tokens = True  # the name of a special token in a text is text
end = tokenizer.token_to_id("<|endoftext|>")
with open(input_path, encoding="utf-8") as records, open(out_path, "wb") as out:
    while lines := list(islice(records, BATCH)):
        texts = [json.loads(line)["text"] for line in lines]
        ids = []
        for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False):
            ids.extend(encoding.ids)
            ids.append(end)
        np.array(ids, dtype=np.uint16).tofile(out)
    out.flush()
    os.fsync(out.fileno())
print(time.perf_counter() - start)
