"""Event stream with every form of the SSE grammar, and a script that feeds it to the page in all its splits."""

# The events must be the same for the whole stream, byte by byte, and in two pieces cut at each byte.
CHECK = """(async (bytes) => {
  const parse = async cuts => {
    const events = [], ends = [...cuts, bytes.length];
    const body = new ReadableStream({ start(c) {
      ends.reduce((at, end) => { c.enqueue(new Uint8Array(bytes.slice(at, end))); return end; }, 0);
      c.close();
    } });
    await readEvents(body, data => events.push(data));
    return JSON.stringify(events);
  };
  const seen = new Set([await parse([]), await parse(bytes.map((_, i) => i))]);
  for (let i = 0; i <= bytes.length; i += 1) seen.add(await parse([i]));
  return [...seen].map(JSON.parse);
})(%s)"""
INPUT = (
    "\ufeffdata: one\r\n\r\n: a comment\r\n\r\ndata:two\r\ndata: lines\r\n\r\n"
    "data: three\rdata: more\r\revent: x\nid: 3\ndata:  café “🦊”\n\n"
    'retry: 5\n\ndata\n\ndata: {"a": "b:c"}\r\n\r\ndata: never finished\n'
)
OUTPUT = ["one", "two\nlines", "three\nmore", " café “🦊”", "", '{"a": "b:c"}']
