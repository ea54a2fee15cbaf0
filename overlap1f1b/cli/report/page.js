"use strict";
// The picture of a report: data has, for each step, tracks of bars; times are milliseconds from the start of the step.
const ROW = 22, LEFT = 190, AXIS = 26, TEXT = "11px system-ui, sans-serif";
const at = id => document.getElementById(id);
const canvas = at("timeline"), frame = at("frame"), tip = at("tip"), pen = canvas.getContext("2d");
let step = null; // what is drawn: {ranks, tracks, end}
let shown = []; // its tracks of the ranks that were chosen
let from = 0, to = 1; // the milliseconds that are drawn
let marked = null; // the exposed time that a row of the table names: {rank, start, end}

// ---------------------------------------------------------------------------------------------- looks

function hatched(colour, both) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 6;
  const draw = tile.getContext("2d");
  draw.fillStyle = colour;
  draw.fillRect(0, 0, 6, 6);
  draw.strokeStyle = "#1f2328";
  for (const sign of both ? [1, -1] : [1]) {
    for (const shift of [-6, 0, 6]) {
      draw.moveTo(shift, sign > 0 ? 6 : 0);
      draw.lineTo(shift + 6, sign > 0 ? 0 : 6);
    }
  }
  draw.stroke();
  return { tile, fill: pen.createPattern(tile, "repeat") };
}

const LOOKS = { // of exposed exchange, by cause
  order: hatched(data.styles.exchange.colour, false),
  imbalance: hatched(data.styles.exchange.colour, true),
  host: hatched(data.styles.other.colour, true),
  link: hatched(data.styles.pair.colour, true),
  pipeline: hatched(data.styles.peer.colour, true),
};
const CAUSES = Object.keys(LOOKS);
const background = look => (look.tile ? "url(" + look.tile.toDataURL() + ")" : look);
const PARTS = [ // of a step, in the order of a bar
  ["compute alone", data.styles.F.colour],
  ["compute with hidden exchange", data.styles.exchange.colour],
  ["exposed exchange", LOOKS.order],
  ...CAUSES.map(cause => ["exposed by " + cause, LOOKS[cause]]),
  ["idle for the pipeline", data.styles.peer.colour],
  ["idle otherwise", data.styles.other.colour],
];

function add(place, kind, text, look = "") {
  const item = place.appendChild(document.createElement(kind));
  item.textContent = text;
  item.className = look;
  return item;
}

function legend(place, entries) {
  for (const [text, look] of entries) {
    const item = add(place, "span", "");
    add(item, "span", "", "swatch").style.background = background(look);
    item.append(text);
  }
}

function ranks() { // a bar of each rank's step
  const most = Math.max(...data.content.ranks.map(rank => rank.step_ms));
  for (const rank of data.content.ranks) {
    const causes = rank.exposed_by_cause_ms, idle = rank.idle_by_cause_ms, hidden = rank.hidden_ms;
    const unknown = causes.order === null ? rank.exposed_ms : null; // of a file without ranges
    const pipeline = idle.pipeline === null ? null : idle.pipeline - causes.pipeline;
    const rest = pipeline === null ? null : rank.step_ms - rank.compute_ms - rank.exposed_ms - pipeline;
    const sizes = [rank.compute_ms - hidden, hidden, unknown, ...CAUSES.map(cause => causes[cause]), pipeline, rest];
    add(at("ranks"), "span", "rank " + rank.rank);
    const bar = add(at("ranks"), "div", "", "bar");
    sizes.forEach((size, number) => {
      if (size === null) return; // not measured
      const piece = add(bar, "span", "");
      piece.style.width = (100 * size) / most + "%";
      piece.style.background = background(PARTS[number][1]);
      piece.title = PARTS[number][0] + ": " + time(size) + ", " + ((100 * size) / rank.step_ms).toFixed(1) + " % of a step";
    });
    add(at("ranks"), "span", time(rank.step_ms));
  }
}

function texts() { // of the report's JSON: the verdict, what the run was, remarks, advice
  const { verdict, ranks, about, advice, notes, drawn_step: drawn } = data.content, steps = ranks[0].steps;
  const mesh = Object.entries(ranks[0].mesh).map(([name, [, size]]) => name + " " + size).join(" × ");
  const facts = [data.title, mesh];
  if (about.schedule) {
    facts.push(about.schedule + ", overlap " + about.overlap, about.microbatches + " microbatches", about.model);
    facts.push("plan: " + about.choice, about.date);
  }
  if (steps > 1) facts.push("bars and tables are means over " + steps + " steps, the timeline shows one");
  at("verdict").textContent = verdict;
  add(at("remarks"), "p", facts.filter(text => text).join(" · "), "dim");
  for (const text of data.remarks) add(at("remarks"), "p", text, "partial");
  for (const text of [...notes, ...advice.map(text => "Try: " + text + ".")]) add(at("remarks"), "p", text);
  const letters = Object.entries(data.letters).filter(([op]) => !op.startsWith("recompute_"));
  at("codes").textContent = "Codes: " + letters.map(([op, letter]) => letter + " " + op).join(", ") +
    "; a small letter is the backward of the same sub-op, w its weight gradient, r its recomputation; the number is " +
    "the microbatch, one in front the stage, ' the second pipe. ew0: the experts' weight gradient of microbatch 0. " +
    "A second row of a lane, such as exchange (2), has what travels at the same time.";
}

function tables() {
  for (const { title, headings, rows, words } of data.tables) {
    const table = add(add(at("tables"), "div", "", "wide"), "table", "");
    add(table, "caption", title);
    [headings, ...rows].forEach((texts, number) => {
      const line = add(table, "tr", "");
      texts.forEach((text, i) => add(line, number ? "td" : "th", text, words.includes(headings[i]) ? "text" : ""));
      if (title !== data.longest || !number) return;
      const span = data.content.longest_exposed[number - 1];
      line.className = "link";
      line.tabIndex = 0;
      line.title = "show it in the timeline";
      line.onclick = () => go(span);
      line.onkeydown = ({ key }) => key === "Enter" && go(span);
    });
  }
}

const time = ms => (ms >= 1000 ? (ms / 1000).toFixed(3) + " s" : ms.toPrecision(4) + " ms");

// ---------------------------------------------------------------------------------------------- data

function opened(number) {
  const { tracks, ranks } = data.steps[number], unmarked = { exposed: [], why: {} };
  for (const track of tracks) {
    track.marks = track.measured ? ranks[track.rank] : unmarked;
    track.bars = track.cells.map(([name, start, end]) => {
      const [what, text, style, share] = data.names[name];
      return { what, text, style, share, start, end, sent: track.measured && track.marks.sent[name] };
    });
  }
  return { number, tracks, ranks, end: tracks.reduce((end, { bars }) => Math.max(end, bars.length && bars.at(-1).end), 0) };
}

function firstAfter(list, value, end) { // index of the first one that ends behind a time
  let low = 0, high = list.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (end(list[middle]) <= value) low = middle + 1;
    else high = middle;
  }
  return low;
}

function parts(intervals, start, end) { // what intervals cover of a time
  const found = [];
  for (let i = firstAfter(intervals, start, one => one[1]); i < intervals.length && intervals[i][0] < end; i++) {
    found.push([Math.max(start, intervals[i][0]), Math.min(end, intervals[i][1])]);
  }
  return found;
}

// ---------------------------------------------------------------------------------------------- drawing

const x = (ms, width) => LEFT + ((ms - from) / (to - from)) * (width - LEFT);
const ms = (pixel, width) => from + ((pixel - LEFT) / (width - LEFT)) * (to - from);

function draw() {
  const height = Math.min(AXIS + ROW * shown.length, Math.round(0.7 * innerHeight)), width = frame.clientWidth;
  at("space").style.height = AXIS + ROW * shown.length - height + "px";
  canvas.style.height = height + "px";
  canvas.width = canvas.clientWidth * devicePixelRatio; // as many pixels as the screen has
  canvas.height = height * devicePixelRatio;
  pen.scale(devicePixelRatio, devicePixelRatio);
  pen.font = TEXT;
  pen.textBaseline = "middle";
  const style = getComputedStyle(document.documentElement), colour = name => style.getPropertyValue(name);
  const scrolled = frame.scrollTop;
  axis(width, height, colour);
  for (let row = Math.floor(scrolled / ROW); row < shown.length; row++) {
    const y = AXIS + row * ROW - scrolled;
    if (y > height) break;
    drawTrack(shown[row], y, width, colour);
    if (row && shown[row].rank !== shown[row - 1].rank) {
      pen.fillStyle = colour("--line");
      pen.fillRect(0, y, width, 1);
    }
  }
  pen.clearRect(0, 0, width, AXIS);
  axis(width, 6, colour);
  if (marked && step.ranks[marked.rank]) {
    const rows = shown.map((track, row) => [track, row]).filter(([track]) => track.rank === marked.rank);
    if (rows.length) {
      const top = Math.max(AXIS, AXIS + rows[0][1] * ROW - scrolled), left = x(marked.start, width);
      pen.strokeStyle = colour("--mark");
      pen.lineWidth = 2;
      pen.strokeRect(left, top, Math.max(2, x(marked.end, width) - left), AXIS + rows.at(-1)[1] * ROW + ROW - scrolled - top);
    }
  }
}

function drawTrack(track, y, width, colour) {
  let drawn = -1;
  for (let i = firstAfter(track.bars, from, bar => bar.end); i < track.bars.length; i++) {
    const bar = track.bars[i];
    if (bar.start > to) break;
    const left = Math.max(LEFT, x(bar.start, width)), right = Math.min(width, x(bar.end, width));
    if (right - left < 0.5 && left - drawn < 0.5) continue; // within a pixel that has a bar
    drawn = right;
    pen.fillStyle = data.styles[bar.style].colour;
    const high = bar.share * (ROW - 4);
    pen.fillRect(left, y + ROW - 2 - high, Math.max(0.6, right - left - (bar.share === 1 && right - left > 4)), high);
    if (bar.style === "exchange") {
      for (const [cause, intervals] of [["order", track.marks.exposed], ...Object.entries(track.marks.why)]) {
        pen.fillStyle = LOOKS[cause].fill;
        for (const [start, end] of parts(intervals, Math.max(bar.start, from), Math.min(bar.end, to))) {
          pen.fillRect(x(start, width), y + 2, Math.max(0.6, x(end, width) - x(start, width)), ROW - 4);
        }
      }
    }
    const wide = right - left > 8 && bar.text ? pen.measureText(bar.text).width : 0;
    if (wide && wide + 4 < right - left) {
      const middle = (left + right) / 2;
      if (bar.style === "exchange") { // hatches would cross the letters
        pen.fillStyle = data.styles.exchange.colour;
        pen.fillRect(middle - wide / 2 - 1.5, y + 4, wide + 3, ROW - 8);
      }
      pen.fillStyle = "#1f2328";
      pen.fillText(bar.text, middle - wide / 2, y + ROW / 2 + 0.5);
    }
  }
  pen.clearRect(0, y, LEFT - 1, ROW);
  pen.fillStyle = colour("--text");
  pen.fillText(track.name, 6, y + ROW / 2 + 0.5);
}

function round(size) { // the next 1, 2 or 5 times a power of ten
  const power = 10 ** Math.floor(Math.log10(size));
  return [1, 2, 5, 10].map(factor => factor * power).find(gap => gap >= size);
}

function axis(width, height, colour) {
  const gap = round((to - from) / Math.max(2, (width - LEFT) / 110));
  const decimals = Math.max(0, -Math.floor(Math.log10(gap)));
  for (let tick = Math.ceil(from / gap) * gap; tick <= to; tick += gap) {
    pen.fillStyle = colour("--line");
    pen.fillRect(x(tick, width), AXIS - 6, 1, height);
    pen.fillStyle = colour("--dim");
    const text = tick.toFixed(decimals), size = pen.measureText(text).width;
    pen.fillText(text, Math.min(Math.max(x(tick, width) - size / 2, LEFT), width - size), 10);
  }
  pen.clearRect(0, 0, LEFT - 1, AXIS);
  pen.fillStyle = colour("--dim");
  pen.fillText("ms from the start of the step", 6, 10);
}

// ---------------------------------------------------------------------------------------------- choices

function show(number) {
  if (step === null || step.number !== number) step = opened(number);
  at("step").value = number;
  const chosen = at("chosen").value.match(/\d+(\s*-\s*\d+)?/g);
  const runs = (chosen || []).map(text => text.split("-").map(Number));
  shown = step.tracks.filter(({ rank }) => !chosen || runs.some(([first, last]) => first <= rank && rank <= (last ?? first)));
  window.requestAnimationFrame(draw);
}

function move(start, end) {
  const least = 2e-3, size = Math.min(Math.max(end - start, least), step.end || 1);
  from = Math.min(Math.max(0, start), Math.max(0, step.end - size));
  to = from + size;
  window.requestAnimationFrame(draw);
}

const zoom = (factor, middle = (from + to) / 2) => move(middle - (middle - from) * factor, middle + (to - middle) * factor);

function go({ rank, step: number, start_ms: start, exposed_ms: size }) { // a row of the longest exposed times
  marked = null;
  at("chosen").value = "";
  show(number);
  const begin = step.ranks[rank].begin + start;
  marked = { rank, start: begin, end: begin + size };
  move(begin - 3 * size, begin + 4 * size);
  frame.scrollTop = ROW * Math.max(0, shown.findIndex(track => track.rank === rank) - 2);
  frame.scrollIntoView({ block: "nearest" });
}

function barAt(event) {
  const place = canvas.getBoundingClientRect(), y = event.clientY - place.top, left = event.clientX - place.left;
  const track = shown[Math.floor((y - AXIS + frame.scrollTop) / ROW)];
  if (!track || y < AXIS || left < LEFT) return null;
  const width = place.width, bar = track.bars[firstAfter(track.bars, ms(left - 1, width), one => one.end)];
  return bar && bar.start <= ms(left + 1, width) ? [track, bar] : null;
}

function told(track, bar) {
  const size = bar.end - bar.start, lines = [track.name + ": " + bar.what];
  lines.push(bar.start.toFixed(3) + " to " + bar.end.toFixed(3) + " ms, " + time(size));
  const covered = intervals => parts(intervals, bar.start, bar.end).reduce((sum, [start, end]) => sum + end - start, 0);
  if (bar.style === "exchange" && track.marks.exposed.length) {
    const causes = Object.entries(track.marks.why).filter(([, intervals]) => covered(intervals));
    const said = causes.map(([cause, intervals]) => cause + " " + time(covered(intervals)));
    lines.push(["exposed " + time(covered(track.marks.exposed)), ...said].join(", "));
  }
  if (bar.sent) {
    const where = track.name.includes(" memory") ? " MB are copied, " : " MB leave the rank, ";
    lines.push((bar.sent / 1e6).toPrecision(3) + where + ((8 * bar.sent) / size / 1e6).toPrecision(3) + " Gbit/s");
  }
  return lines.join("\n");
}

function hover(event) {
  const found = barAt(event);
  tip.style.display = found ? "block" : "none";
  if (!found) return;
  tip.textContent = told(...found);
  tip.style.left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8) + "px";
  tip.style.top = Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8) + "px";
}

let grip = null;
canvas.onpointerdown = event => {
  grip = { left: event.clientX, from, to };
  canvas.setPointerCapture(event.pointerId);
};
canvas.onpointerup = () => (grip = null);
canvas.onpointermove = event => {
  if (!grip) return hover(event);
  const by = ((event.clientX - grip.left) / (frame.clientWidth - LEFT)) * (grip.to - grip.from);
  move(grip.from - by, grip.to - by);
};
canvas.onpointerleave = () => (tip.style.display = "none");
canvas.ondblclick = () => move(0, step.end);
canvas.addEventListener("wheel", event => {
  if (!event.ctrlKey && !event.metaKey) return;
  event.preventDefault();
  zoom(1.0015 ** event.deltaY, ms(event.clientX - canvas.getBoundingClientRect().left, frame.clientWidth));
}, { passive: false });
canvas.onkeydown = ({ key }) => {
  const by = { ArrowLeft: -0.1, ArrowRight: 0.1 }[key] * (to - from);
  if (key === "+" || key === "-") zoom(key === "+" ? 0.7 : 1 / 0.7);
  else if (by) move(from + by, to + by);
};
frame.onscroll = draw;
window.onresize = draw;
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
at("in").onclick = () => zoom(0.5);
at("out").onclick = () => zoom(2);
at("all").onclick = () => move(0, step.end);
at("step").onchange = () => {
  marked = null;
  show(Number(at("step").value));
  move(from, to);
};
at("chosen").oninput = () => show(step.number);
for (const number of Object.keys(data.steps)) at("step").add(new Option(number));
texts();
tables();
ranks();
legend(at("parts"), PARTS);
show(data.content.drawn_step);
move(0, step.end);
const used = new Set(step.tracks.flatMap(track => track.bars.map(bar => bar.style)));
legend(at("legend"), [
  ...Object.entries(data.styles).filter(([key]) => used.has(key)).map(([key, style]) => [key === "exchange" ? "exchange, hidden" : style.label, style.colour]),
  ...CAUSES.map(cause => ["exposed by " + cause, LOOKS[cause]]),
]);
