// Asks each reader: a question a line on stdin, an answer a line on stdout. Built by go_readers.py.
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"

	old "github.com/llm-d/llm-d-kv-cache/pkg/kvevents"
	oldadapter "github.com/llm-d/llm-d-kv-cache/pkg/kvevents/engineadapter"
	"github.com/llm-d/llm-d-router/pkg/kvevents"
	"github.com/llm-d/llm-d-router/pkg/kvevents/engineadapter"
	"github.com/vllm-project/aibrix/pkg/cache/kvcache"
)

type question struct {
	Reader  string
	Payload []byte
}

type answer struct {
	Error   string
	Events  []any
	Refused []string
}

func ask(q question) (a answer) {
	defer func() {
		if r := recover(); r != nil {
			a.Error = fmt.Sprintf("panic: %v", r)
		}
	}()
	var err error
	switch q.Reader {
	case "llm-d", "llm-d-sglang":
		var adapter kvevents.EngineAdapter = engineadapter.NewVLLMAdapter()
		if q.Reader == "llm-d-sglang" {
			adapter = engineadapter.NewSGLangAdapter()
		}
		var batch kvevents.EventBatch
		_, _, batch, err = adapter.ParseMessage(&kvevents.RawMessage{Topic: "kv@pod@model", Payload: q.Payload})
		for _, event := range batch.Events {
			a.Events = append(a.Events, event)
			refused := ""
			if stored, ok := event.(*kvevents.BlockStoredEvent); ok {
				_, refused = kvevents.Digestible(stored)
			}
			a.Refused = append(a.Refused, refused)
		}
	case "llm-d-arrays":
		var batch old.EventBatch
		_, _, batch, err = oldadapter.NewVLLMAdapter().ParseMessage(&old.RawMessage{Topic: "kv@pod@model", Payload: q.Payload})
		for _, event := range batch.Events {
			a.Events = append(a.Events, event)
			a.Refused = append(a.Refused, "")
		}
	case "aibrix":
		var batch *kvcache.EventBatch
		batch, err = kvcache.DecodeEventBatch(q.Payload, "model", "pod")
		if batch != nil {
			for _, event := range batch.Events {
				a.Events = append(a.Events, event)
				refused := ""
				if e, ok := event.(*kvcache.BlockStoredEvent); ok && len(e.BlockHashes) != len(e.TokenIDs) {
					refused = "the indexer takes as many hashes as blocks of tokens"
				}
				a.Refused = append(a.Refused, refused)
			}
		}
	}
	if err != nil {
		a.Error = err.Error()
	}
	return a
}

func main() {
	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(nil, 1<<26)
	out := json.NewEncoder(os.Stdout)
	for lines.Scan() {
		var q question
		if err := json.Unmarshal(lines.Bytes(), &q); err != nil {
			panic(err)
		}
		if err := out.Encode(ask(q)); err != nil {
			panic(err)
		}
	}
}
