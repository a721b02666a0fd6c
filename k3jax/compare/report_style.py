"""The report's style sheet: light and dark, from a phone's width up, with the system's own fonts."""

STYLE = """
:root {
  --paper: #fbfaf7; --card: #ffffff; --ink: #1d1f23; --soft: #62666e; --line: #e3e1da; --good: #16703f;
    --good-bg: #e4f3ea;
  --bad: #b3261e; --bad-bg: #fbe6e4; --c0: #2f63c0; --c1: #0f8276; --c2: #c8641b; --c3: #8a3fb0; --c4: #6c7480;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #14161a; --card: #1c1f25; --ink: #e9e8e4; --soft: #9da2ac; --line: #31353d; --good: #6fd39b;
      --good-bg: #173526;
    --bad: #ff8a80; --bad-bg: #45201d; --c0: #7ea8f8; --c1: #4fc9ba; --c2: #f2a263; --c3: #cf93ee; --c4: #9aa3b0;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); line-height: 1.5;
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "Liberation Sans", sans-serif;
  font-variant-numeric: tabular-nums; -webkit-text-size-adjust: 100%; }
main { max-width: 1040px; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
header { margin-bottom: 3rem; }
.eyebrow { margin: 0; color: var(--soft); font-size: .85rem; letter-spacing: .06em; text-transform: uppercase; }
h1 { display: flex; align-items: center; gap: .7rem; margin: .3rem 0 .4rem; font-size: clamp(1.7rem, 5vw, 2.5rem);
  line-height: 1.15; letter-spacing: -.02em; text-wrap: balance; }
h2 { margin: 3.5rem 0 .2rem; padding-top: 1rem; border-top: 1px solid var(--line); font-size: 1.5rem;
  letter-spacing: -.01em; }
h2 small { margin-left: .4rem; color: var(--soft); font-size: 1rem; font-weight: 400; letter-spacing: 0; }
@media (max-width: 560px) { h2 small { display: block; margin: 0; } }
h3 { margin: 0; font-size: 1rem; }
.badge { display: grid; place-items: center; flex: none; width: 1.35em; height: 1.35em; border-radius: 50%;
  font-size: .8em; }
.pass .badge { background: var(--good-bg); color: var(--good); }
.fail .badge { background: var(--bad-bg); color: var(--bad); }
.verdict p { margin: 0 0 .4rem; font-size: 1.1rem; max-width: 46rem; overflow-wrap: anywhere; }
.facts { display: grid; gap: .2rem; margin: 1.2rem 0 1.6rem; }
.facts div { display: grid; grid-template-columns: 7rem 1fr; }
.facts dt { color: var(--soft); }
.facts dd { margin: 0; overflow-wrap: anywhere; }
.legend { display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; margin: .3rem 0 1rem; color: var(--soft);
  font-size: .95rem; }
.legend span { display: inline-flex; align-items: center; gap: .4rem; }
.key { width: 13px; height: 13px; }
.plots { columns: 2 340px; column-gap: 1rem; margin-bottom: 1rem; }
figure { break-inside: avoid; margin: 0 0 1rem; padding: 1rem 1.1rem .8rem; background: var(--card);
  border: 1px solid var(--line);
  border-radius: 10px; }
figcaption { margin: .1rem 0 .7rem; color: var(--soft); font-size: .88rem; line-height: 1.4; }
.plot { display: block; width: 100%; height: auto; }
.plot + .plot { margin-top: .5rem; }
.plot text { fill: var(--soft); font-size: 11.5px; }
.plot .name { fill: var(--ink); font-size: 13px; dominant-baseline: middle; }
.grid { stroke: var(--line); }
.axis { stroke: var(--soft); }
.limit { stroke: var(--ink); stroke-width: 2; }
.dash { stroke-width: 1.2; stroke-dasharray: 5 4; }
.c0 { fill: var(--c0); } .c1 { fill: var(--c1); } .c2 { fill: var(--c2); } .c3 { fill: var(--c3);
  } .c4 { fill: var(--c4); }
.outline { fill: none; stroke-width: 1.8; }
.outline.c0 { stroke: var(--c0); stroke-width: 4; stroke-opacity: .55; }
.outline.c1 { stroke: var(--c1); } .outline.c2 { stroke: var(--c2); } .outline.c3 { stroke: var(--c3); }
.outline.c0, .outline.c1, .outline.c2, .outline.c3 { fill: none; }
.bad { fill: none; stroke: var(--bad); stroke-width: 2; }
.broken { fill: var(--bad); }
.scroll { overflow-x: auto; }
table { width: 100%; border-collapse: collapse; font-size: .93rem; }
th, td { padding: .42rem .9rem .42rem 0; border-bottom: 1px solid var(--line); text-align: left;
  vertical-align: top; white-space: nowrap; }
th { color: var(--soft); font-weight: 500; }
td.n { font-variant-numeric: tabular-nums; }
.note td { padding-top: 0; color: var(--soft); font-size: .88rem; white-space: normal; }
.wrong td { color: var(--bad); }
.pill { padding: .08rem .5rem; border-radius: 99px; font-size: .88em; white-space: nowrap; }
.pill.pass { background: var(--good-bg); color: var(--good); }
.pill.fail { background: var(--bad-bg); color: var(--bad); }
details { margin: .6rem 0; padding: .7rem 1.1rem; background: var(--card); border: 1px solid var(--line);
  border-radius: 10px; }
summary { cursor: pointer; font-weight: 500; }
details .scroll { margin-top: .6rem; }
code { font: .92em ui-monospace, "SF Mono", Menlo, Consolas, "Liberation Mono", monospace; overflow-wrap: anywhere;
  white-space: normal; }
a { color: inherit; }
@media print { body { background: #fff; } }
"""
