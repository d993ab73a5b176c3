"""Run one vLLM engine over a job and write what it did: `python serving_worker.py job.json out.json [go]`.

With a third path, the engine starts and warms up, and measures once that file exists: engines that share a device can start
side by side, which takes most of the time, and be measured one after the other.

Stands alone: it imports vLLM and the standard library only, so it can be copied to a machine that has nothing else. One engine
a process, since vLLM does not release a device reliably within one.

job.json
  target        what vLLM loads
  engine        keyword arguments of vllm.LLM (dtype, max_model_len, attention_backend, ...)
  speculative   speculative_config, or null for the verifier alone
  sets          {name: [{"id": str, "turns": [str, ...]} or {"id": str, "token_ids": [int, ...]}, ...]}
  cells         [{"set", "temperature", "concurrency", "max_tokens", "seed", "limit", "ignore_eos"}, ...] measured in order;
                `limit` prompts of the set, or all
  warmup        requests to run and forget before the first cell
  template      options of the chat template, such as {"enable_thinking": false}

out.json, rewritten after every cell
  engine        versions, device, seconds to start, the arguments
  cells         each job cell with seconds, output_tokens, counters (vLLM's spec_decode counters, difference over the cell) and
                requests: id, turn, prompt_tokens, token_ids, finish_reason, seconds; counters too where concurrency is 1
  complete      true once every cell is done
"""

import json
import os
import signal
import sys
import threading
import time

COUNTERS = {
    "vllm:spec_decode_num_drafts": "drafts",
    "vllm:spec_decode_num_draft_tokens": "draft_tokens",
    "vllm:spec_decode_num_accepted_tokens": "accepted",
    "vllm:spec_decode_num_accepted_tokens_per_pos": "accepted_per_position",
}


def read_counters(llm):
    """Speculation counters since the engine started; empty for an engine without a draft."""
    found = {}
    for metric in llm.get_metrics():
        name = COUNTERS.get(metric.name)
        if name is not None:
            found[name] = list(metric.values) if hasattr(metric, "values") else metric.value
    return found


def difference(after, before):
    """Counters of an interval."""
    result = {}
    for name, value in after.items():
        earlier = before.get(name)
        if isinstance(value, list):
            earlier = earlier or [0] * len(value)
            result[name] = [a - b for a, b in zip(value, earlier)]
        else:
            result[name] = value - (earlier or 0)
    return result


class Conversation:
    """One prompt: its turns are asked in order, each answer becoming part of the next question."""

    def __init__(self, prompt, tokenizer, template):
        self.id = prompt["id"]
        self.turns = list(prompt.get("turns") or [])
        self.given = prompt.get("token_ids")
        self.tokenizer = tokenizer
        self.template = template
        self.messages = []
        self.turn = 0

    def next_ids(self):
        """Token ids of the next request; None when every turn is answered."""
        if self.given is not None:
            return list(self.given) if self.turn == 0 else None
        if self.turn >= len(self.turns):
            return None
        self.messages.append({"role": "user", "content": self.turns[self.turn]})
        text = self.tokenizer.apply_chat_template(
            self.messages, add_generation_prompt=True, tokenize=False, **self.template
        )
        return self.tokenizer.encode(text, add_special_tokens=False)

    def answer(self, text):
        self.messages.append({"role": "assistant", "content": text})
        self.turn += 1


def run_cell(llm, prompts, cell, template):
    """Keep `concurrency` requests in flight until every conversation is done."""
    from vllm import SamplingParams

    engine, tokenizer = llm.llm_engine, llm.get_tokenizer()
    waiting = [Conversation(p, tokenizer, template) for p in prompts]
    waiting.reverse()
    flying, requests = {}, []
    alone = cell["concurrency"] == 1
    settings = SamplingParams(
        temperature=cell["temperature"],
        max_tokens=cell["max_tokens"],
        seed=cell.get("seed"),
        ignore_eos=cell.get("ignore_eos", False),
    )
    before = read_counters(llm)
    last = before
    started = time.perf_counter()
    serial = 0
    while waiting or flying:
        while waiting and len(flying) < cell["concurrency"]:
            conversation = waiting.pop()
            ids = conversation.next_ids()
            if ids is None:
                continue
            name = f"{cell['set']}-{cell['temperature']}-{cell['concurrency']}-{serial}"
            serial += 1
            engine.add_request(name, {"prompt_token_ids": ids}, settings)
            flying[name] = (conversation, len(ids), time.perf_counter())
        for output in engine.step():
            if not output.finished:
                continue
            conversation, prompt_tokens, began = flying.pop(output.request_id)
            result = output.outputs[0]
            row = {
                "id": conversation.id,
                "turn": conversation.turn,
                "prompt_tokens": prompt_tokens,
                "token_ids": list(result.token_ids),
                "finish_reason": result.finish_reason,
                "seconds": time.perf_counter() - began,
            }
            if alone:
                now = read_counters(llm)
                row["counters"] = difference(now, last)
                last = now
            requests.append(row)
            conversation.answer(result.text)
            waiting.append(conversation)
    seconds = time.perf_counter() - started
    return {
        **cell,
        "seconds": seconds,
        "output_tokens": sum(len(r["token_ids"]) for r in requests),
        "counters": difference(read_counters(llm), before),
        "requests": requests,
    }


def write(path, values):
    temporary = path + ".tmp"
    with open(temporary, "w") as file:
        json.dump(values, file)
    os.replace(temporary, path)


def describe(llm, job, seconds):
    import vllm

    torch = sys.modules.get("torch")  # vLLM has imported it
    cuda = torch is not None and torch.cuda.is_available()
    return {
        "vllm": vllm.__version__,
        "torch": getattr(torch, "__version__", None),
        "transformers": getattr(sys.modules.get("transformers"), "__version__", None),
        "python": sys.version.split()[0],
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "start_seconds": seconds,
        "target": job["target"],
        "arguments": job["engine"],
        "speculative": job["speculative"],
    }


def end_with_parent():
    """Take the engine's processes along when whoever started this one is killed; only as the leader of its own group."""
    parent = os.getppid()

    def watch():
        while os.getppid() == parent:
            time.sleep(1.0)
        os.killpg(os.getpgrp(), signal.SIGKILL)

    if os.getpgrp() == os.getpid() and os.getsid(0) == os.getpid():
        threading.Thread(target=watch, daemon=True).start()


def main():
    job_path, out_path = sys.argv[1:3]
    end_with_parent()
    with open(job_path) as file:
        job = json.load(file)
    from vllm import LLM

    started = time.perf_counter()
    llm = LLM(
        model=job["target"],
        disable_log_stats=False,
        **job["engine"],
        **({"speculative_config": job["speculative"]} if job["speculative"] else {}),
    )
    result = {
        "engine": describe(llm, job, time.perf_counter() - started),
        "cells": [],
        "complete": False,
    }
    write(out_path, result)
    template = job.get("template") or {}
    warmup = job.get("warmup") or 0
    if warmup:
        first = job["cells"][0]
        cell = {**first, "concurrency": min(warmup, first["concurrency"]), "max_tokens": 16}
        run_cell(llm, job["sets"][first["set"]][:warmup], cell, template)
    while len(sys.argv) > 3 and not os.path.exists(sys.argv[3]):
        time.sleep(0.2)
    for cell in job["cells"]:
        measured = run_cell(llm, job["sets"][cell["set"]][: cell.get("limit")], cell, template)
        result["cells"].append(measured)
        write(out_path, result)
        rate = measured["output_tokens"] / measured["seconds"]
        print(
            f"{cell['set']} T={cell['temperature']} C={cell['concurrency']}: {rate:.1f} tok/s {measured['counters']}",
            file=sys.stderr,
            flush=True,
        )
    result["complete"] = True
    write(out_path, result)


if __name__ == "__main__":
    main()
