"use strict";
// The picture of a report: data has, for each step, tracks of bars; times are in units of 0.1 µs, as differences.
const ROW = 22, LEFT = 190, AXIS = 26, UNIT = 1e-4, TEXT = "11px system-ui, sans-serif";
const at = id => document.getElementById(id);
const data = JSON.parse(at("data").textContent);
const canvas = at("timeline"), frame = at("frame"), tip = at("tip"), pen = canvas.getContext("2d");
const picture = at("memory"), brush = picture.getContext("2d");
let step = null; // what is drawn: {ranks, tracks, end}
let shown = []; // its tracks of the ranks that were chosen
let from = 0, to = 1; // the milliseconds that are drawn
let memory = null; // of the chosen rank: {name, levels, peak, most}
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

const exposed = hatched(data.styles.exchange.colour, false), late = hatched(data.styles.exchange.colour, true);
const background = look => (look.tile ? "url(" + look.tile.toDataURL() + ")" : look);
const PARTS = [ // of a step, in the order of a bar
  ["compute alone", data.styles.F.colour],
  ["compute with hidden exchange", data.styles.exchange.colour],
  ["exposed exchange", exposed],
  ["exposed, waiting for a late peer", late],
  ["idle for the pipeline", data.styles.peer.colour],
  ["idle for the host", data.styles.other.colour],
];
const [PARAMETERS, GRADIENTS, EVEN, ODD, FLYING, WORKING] = ["peer", "W", "F", "pair", "exchange", "other"].map(style => data.styles[style].colour);

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
    const late = rank.late_peer_ms || 0, idle = rank.idle_ms, hidden = rank.hidden_ms;
    const sizes = [rank.compute_ms - hidden, hidden, idle.exposed_exchange - late, late, idle.pipeline_bubble, idle.host_late];
    add(at("ranks"), "span", "rank " + rank.rank);
    const bar = add(at("ranks"), "div", "", "bar");
    sizes.forEach((size, number) => {
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

function tables() { // a figure has its keys in the report's JSON
  for (const [title, headings, rows] of data.tables) {
    const table = add(add(at("tables"), "div", "", "wide"), "table", "");
    add(table, "caption", title);
    for (const [kind, cells] of [["th", headings.map((text, i) => [text, rows[0][i][1]])], ...rows.map(row => ["td", row])]) {
      const line = add(table, "tr", "");
      for (const [text, path] of cells) {
        const cell = add(line, kind, text, path.length ? "" : "text");
        if (kind === "td" && path.length) cell.dataset.path = path.join("/");
        if (path[0] === "longest_exposed" && kind === "td") line.dataset.longest = path[1];
      }
    }
  }
  for (const row of document.querySelectorAll("tr[data-longest]")) {
    const span = data.content.longest_exposed[row.dataset.longest];
    row.className = "link";
    row.tabIndex = 0;
    row.title = "show it in the timeline";
    row.onclick = () => go(span);
    row.onkeydown = ({ key }) => key === "Enter" && go(span);
  }
}

const unit = bytes => Math.min(4, Math.floor(Math.log10(Math.max(1, bytes)) / 3));
const amount = (bytes, power = unit(bytes)) => Number((bytes / 1000 ** power).toPrecision(4)) + " " + ["B", "kB", "MB", "GB", "TB"][power];
const time = ms => (ms >= 1000 ? (ms / 1000).toFixed(3) + " s" : ms.toPrecision(4) + " ms");

// ---------------------------------------------------------------------------------------------- data

function opened(number) {
  const packed = data.steps[number], tracks = [];
  const intervals = flat => Array.from({ length: flat.length / 2 }, (_, i) => [flat[2 * i] * UNIT, flat[2 * i + 1] * UNIT]);
  const ranks = {};
  for (const [rank, marks] of Object.entries(packed.ranks)) {
    ranks[rank] = { ...marks, begin: marks.begin * UNIT, exposed: intervals(marks.exposed), late: intervals(marks.late) };
  }
  let end = 0;
  for (const { name, rank, measured, cells } of packed.tracks) {
    const bars = [];
    let now = 0;
    for (let i = 0; i < cells.length; i += 3) {
      const start = now + cells[i + 1];
      now = start + cells[i + 2];
      const [what, text, style] = data.names[cells[i]];
      bars.push({ what, text, style, start: start * UNIT, end: now * UNIT, sent: measured && ranks[rank].sent[cells[i]] });
    }
    end = Math.max(end, now * UNIT);
    tracks.push({ name, rank, measured, marks: measured ? ranks[rank] : { exposed: [], late: [] }, bars });
  }
  return { number, tracks, ranks, end };
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

// ---------------------------------------------------------------------------------------------- memory

function held({ rank, measured }) { // levels of bytes over the step: a node takes and gives back in the order of issue
  const { order, parameters, sharded } = step.ranks[rank], bars = new Map(), levels = [], flying = [], alive = new Map();
  for (const track of step.tracks.filter(track => track.rank === rank && track.measured === measured)) {
    for (const bar of track.bars) bars.set(bar.what, bar);
  }
  const nodes = data.orders[order].map(index => [index < 0, index < 0 ? ~index : index]); // whether its cost begins, and its name
  const microbatch = index => Number(data.names[index][0].match(/ m(\d+)/)[1]);
  const last = new Map(nodes.map(([, index], place) => [microbatch(index), place]));
  let now = 0, gathered = parameters, gradients = 0;
  const grow = (number, bytes) => alive.set(number, (alive.get(number) || 0) + bytes);
  const level = (at, working) => {
    const flight = flying.reduce((sum, { bytes }) => sum + bytes, 0), sum = [...alive.values()].reduce((sum, bytes) => sum + bytes, 0);
    const microbatches = [...alive].filter(([, bytes]) => bytes > 0).sort(([a], [b]) => a - b);
    const parts = [
      ["parameters", gathered, PARAMETERS],
      ["gradients", gradients, GRADIENTS],
      ...microbatches.map(([number, bytes]) => ["activations of microbatch " + number, bytes, number % 2 ? ODD : EVEN, String(number)]),
      ["in flight", flight, FLYING],
      ["working space of a node", working, WORKING],
    ];
    if (levels.length) levels.at(-1).end = at;
    levels.push({ at, end: step.end, parts, sum: gathered + gradients + sum + flight + working });
  };
  const until = (end, working) => { // what has arrived belongs to its microbatch
    while (flying.length && flying[0].end <= end) {
      const { end: at, number, bytes } = flying.shift();
      grow(number, bytes);
      level(Math.max(at, now), working);
    }
    now = end;
  };
  level(0, 0);
  nodes.forEach(([first, index], place) => {
    const [what, , style] = data.names[index], [kept, most, more] = data.held[index], bar = bars.get(what), number = microbatch(index);
    const travels = style === "exchange" || style === "peer";
    until(bar && !travels ? Math.max(now, bar.start) : now, 0);
    if (first && style !== "F") gradients += more;
    else if (first && sharded) gathered += more;
    else if (first) grow(number, more); // the first may be larger than the median
    if (most > 0) level(now, most);
    if (bar && !travels) until(Math.max(now, bar.end), Math.max(0, most));
    if (what.startsWith("reduce.")) gradients += kept;
    else if (travels && bar && kept > 0) {
      flying.push({ end: bar.end, number, bytes: kept });
      flying.sort((a, b) => a.end - b.end);
    } else grow(number, kept);
    if (last.get(number) === place) { // what it leaves behind
      gradients += alive.get(number) || 0;
      alive.delete(number);
    }
    level(now, 0);
  });
  until(Math.max(now, step.end), 0);
  const peak = levels.reduce((most, one) => (one.sum > most.sum ? one : most));
  const { peak_bytes: most } = data.content.ranks.find(one => one.rank === rank);
  return { levels, peak: { ...peak, beyond: peak.sum - parameters }, most };
}

function drawMemory(width, colour) {
  const height = picture.clientHeight, { levels, peak, most, name } = memory;
  fit(picture, brush, height);
  const top = AXIS + 20, y = bytes => height - (bytes / peak.sum) * (height - top);
  axis(width, height, colour, brush);
  brush.textAlign = "right";
  for (let tick = 0, gap = round(peak.sum / 5); tick <= peak.sum; tick += gap) {
    brush.fillStyle = colour("--line");
    brush.fillRect(LEFT - 5, y(tick) - 1, width, 1);
    brush.fillStyle = colour("--text");
    brush.fillText(amount(tick, unit(peak.sum)), LEFT - 8, Math.min(y(tick), height - 7));
  }
  brush.textAlign = "left";
  const labels = new Map(); // of each microbatch its widest place
  for (let i = firstAfter(levels, from, one => one.end); i < levels.length && levels[i].at <= to; i++) {
    const { at, end, parts } = levels[i], left = Math.round(Math.max(LEFT, x(at, width)));
    const wide = Math.max(1, Math.round(Math.min(width, x(end, width))) - left); // whole pixels: no seams
    let bytes = 0;
    for (const [, more, look, text] of parts) {
      const high = y(bytes) - y(bytes + more);
      bytes += more;
      brush.fillStyle = look;
      brush.fillRect(left, y(bytes), wide, high);
      if (!text) continue;
      brush.fillStyle = colour("--back"); // microbatches of one colour may be neighbours
      brush.fillRect(left, y(bytes), wide, 0.5);
      if (high > 11 && wide > (labels.get(text) || [8])[0]) labels.set(text, [wide, left + wide / 2, y(bytes) + high / 2]);
    }
  }
  brush.fillStyle = "#1f2328";
  brush.textAlign = "center";
  for (const [text, [, middle, line]] of labels) brush.fillText(text, middle, line);
  brush.fillStyle = colour("--mark");
  brush.fillRect(LEFT, top - 1, width, 1);
  brush.textAlign = "left";
  const text = "peak " + amount(peak.sum) + ", " + amount(peak.beyond) + " of it beyond the parameters, at " + time(peak.at);
  brush.fillText(text + (peak.beyond < most ? "; in another step " + amount(most) + " beyond them" : ""), LEFT + 4, top - 9);
  brush.fillStyle = colour("--text");
  brush.fillText("held by " + name, 6, top - 9);
}

function choose() { // the rank of the picture
  const before = at("rank").value, found = new Map();
  for (const { rank, measured } of step.tracks) {
    if (step.ranks[rank].order !== undefined) found.set("rank " + rank + (measured ? "" : " predicted"), { rank, measured });
  }
  at("bytes").hidden = !found.size;
  at("rank").replaceChildren(...[...found.keys()].map(name => new Option(name)));
  at("rank").value = found.has(before) ? before : found.keys().next().value;
  memory = found.size ? { name: at("rank").value, ...held(found.get(at("rank").value)) } : null;
}

// ---------------------------------------------------------------------------------------------- drawing

const x = (ms, width) => LEFT + ((ms - from) / (to - from)) * (width - LEFT);
const ms = (pixel, width) => from + ((pixel - LEFT) / (width - LEFT)) * (to - from);

function fit(place, brush, height) { // as many pixels as the screen has
  place.width = place.clientWidth * devicePixelRatio;
  place.height = height * devicePixelRatio;
  brush.scale(devicePixelRatio, devicePixelRatio);
  brush.font = TEXT;
  brush.textBaseline = "middle";
}

function draw() {
  const height = Math.min(AXIS + ROW * shown.length, Math.round(0.7 * innerHeight)), width = frame.clientWidth;
  at("space").style.height = AXIS + ROW * shown.length - height + "px";
  canvas.style.height = height + "px";
  fit(canvas, pen, height);
  const style = getComputedStyle(document.documentElement), colour = name => style.getPropertyValue(name);
  const scrolled = frame.scrollTop;
  axis(width, height, colour, pen);
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
  axis(width, 6, colour, pen);
  if (memory) drawMemory(width, colour);
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
    pen.fillRect(left, y + 2, Math.max(0.6, right - left - (right - left > 4)), ROW - 4);
    if (bar.style === "exchange") {
      for (const [look, intervals] of [[exposed, track.marks.exposed], [late, track.marks.late]]) {
        pen.fillStyle = look.fill;
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

function axis(width, height, colour, pen) {
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
  choose();
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
    lines.push("exposed " + time(covered(track.marks.exposed)) + ", of it waiting for a late peer " + time(covered(track.marks.late)));
  }
  if (bar.sent) {
    lines.push((bar.sent / 1e6).toPrecision(3) + " MB leave the rank, " + ((8 * bar.sent) / size / 1e6).toPrecision(3) + " Gbit/s");
  }
  return lines.join("\n");
}

function bytesAt(event) { // what the picture of memory says of a time
  const place = picture.getBoundingClientRect(), left = event.clientX - place.left;
  if (left < LEFT || left > frame.clientWidth) return null;
  const at = ms(left, frame.clientWidth), { parts, sum } = memory.levels[firstAfter(memory.levels, at, one => one.end)] || memory.levels.at(-1);
  const lines = parts.filter(([, bytes]) => bytes > 0).map(([name, bytes]) => name + ": " + amount(bytes)).reverse();
  return [memory.name + " at " + time(at) + ": " + amount(sum), ...lines].join("\n");
}

function hover(event) {
  const found = event.currentTarget === picture ? bytesAt(event) : barAt(event);
  tip.style.display = found ? "block" : "none";
  if (!found) return;
  tip.textContent = typeof found === "string" ? found : told(...found);
  tip.style.left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8) + "px";
  tip.style.top = Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8) + "px";
}

let grip = null;
for (const one of [canvas, picture]) {
  one.onpointerdown = event => {
    grip = { left: event.clientX, from, to };
    one.setPointerCapture(event.pointerId);
  };
  one.onpointerup = () => (grip = null);
  one.onpointermove = event => {
    if (!grip) return hover(event);
    const by = ((event.clientX - grip.left) / (frame.clientWidth - LEFT)) * (grip.to - grip.from);
    move(grip.from - by, grip.to - by);
  };
  one.onpointerleave = () => (tip.style.display = "none");
  one.ondblclick = () => move(0, step.end);
  one.addEventListener("wheel", event => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    zoom(1.0015 ** event.deltaY, ms(event.clientX - one.getBoundingClientRect().left, frame.clientWidth));
  }, { passive: false });
}
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
at("chosen").oninput = at("rank").onchange = () => show(step.number);
for (const number of Object.keys(data.steps)) at("step").add(new Option(number));
texts();
tables();
ranks();
legend(at("parts"), PARTS);
legend(at("kept"), [
  ["parameters", PARAMETERS],
  ["gradients", GRADIENTS],
  ["activations of microbatches 0, 2, …", EVEN],
  ["of 1, 3, …", ODD],
  ["rows and activations in flight", FLYING],
  ["working space of the node that runs", WORKING],
]);
show(data.content.drawn_step);
move(0, step.end);
const used = new Set(step.tracks.flatMap(track => track.bars.map(bar => bar.style)));
legend(at("legend"), [
  ...Object.entries(data.styles).filter(([key]) => used.has(key)).map(([key, style]) => [key === "exchange" ? "exchange, hidden" : style.label, style.colour]),
  ["exchange, exposed", exposed],
  ["exchange, exposed, waiting for a late peer", late],
]);
