const DASHES = ["none", "7 4", "8 3 2 3", "2 3"];
const FRAME = { height: 320, left: 56, right: 16, top: 12, bottom: 24 };
// The width of a letter of a chart's text, and the height of a line.
const LETTER = 7.5, LINE = 14;
const number = x => x === null ? "–" : x !== 0 && (Math.abs(x) < 1e-3 || Math.abs(x) >= 1e6) ? x.toExponential(2) : String(+x.toPrecision(4));
const signed = x => (x > 0 ? "+" : "") + number(x);
const lagWords = lag => `lag ${lag > 0 ? "+" : ""}${lag}`;
const LAG_TITLE = "lag: key minus query, in tokens (negative is the past)";

// Text goes in as text, never as markup.
function element(parent, name, attributes = {}, text = null) {
  const space = parent.namespaceURI.endsWith("svg") || name === "svg" ? "http://www.w3.org/2000/svg" : "http://www.w3.org/1999/xhtml";
  const made = document.createElementNS(space, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== null) made.textContent = text;
  return parent.appendChild(made);
}

function fillSelect(select, names) {
  select.replaceChildren();
  names.forEach((name, index) => element(select, "option", { value: index }, name));
}

function sortable(table) {
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
  heads.forEach((head, column) => head.querySelector("button")?.addEventListener("click", () => {
    const up = head.getAttribute("aria-sort") !== "ascending";
    heads.forEach(each => each.hasAttribute("aria-sort") && each.setAttribute("aria-sort", "none"));
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const rows = [...body.rows].map(row => [row, row.cells[column].dataset.value ?? row.cells[column].textContent]);
    const known = rows.filter(([, value]) => value !== ""), unknown = rows.filter(([, value]) => value === "");
    known.sort(([, a], [, b]) => (up ? 1 : -1) * (column ? a - b : a.localeCompare(b)));
    body.append(...known.concat(unknown).map(([row]) => row));
  }));
}

// Charts are drawn for the width of their place, so that their text has one size on all screens and on paper.
const drawings = new Map();
const watcher = new ResizeObserver(entries => {
  for (const { target } of entries) if (target.clientWidth !== drawings.get(target).width) redraw(target);
});

// Remembers how a place is drawn: it is drawn anew when its width changes.
function keepDrawn(place, draw) {
  drawings.set(place, { draw });
  watcher.observe(place);
}

function redraw(place) {
  const drawing = drawings.get(place);
  drawing.width = place.clientWidth;
  drawing.draw();
}

for (const [name, onPaper] of [["beforeprint", true], ["afterprint", false]]) {
  addEventListener(name, () => {
    document.body.classList.toggle("paper", onPaper);
    for (const place of drawings.keys()) redraw(place);
  });
}

// Returns some six round numbers of a range, or fewer.
function ticks(low, high, most = 6) {
  const rough = (high - low) / Math.min(6, most) || 1, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find(each => each * power >= rough);
  const found = [];
  for (let at = Math.ceil(low / step); at * step <= high + step * 1e-6; at++) found.push(+(at * step).toPrecision(12));
  return found;
}

// Makes the picture of a chart between its titles, which are text of the page because text of a picture has no lines.
function picture(parent, frame, label, xTitle, yTitle = "") {
  const { width, height } = frame;
  parent.replaceChildren();
  if (yTitle) element(parent, "div", { class: "axis", "aria-hidden": "true" }, yTitle);
  const svg = element(parent, "svg", { class: "chart", width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  element(parent, "div", { class: "axis across", "aria-hidden": "true" }, xTitle);
  return svg;
}

// Returns a chart with axes, and the functions from values to places in it.
function chart(parent, xs, ys, xTitle, yTitle, wanted = {}) {
  const width = parent.clientWidth, frame = { ...FRAME, width, ...wanted };
  frame.height = Math.min(frame.height, Math.max(240, width * 0.75));
  const { height, left, right, top, bottom } = frame;
  const range = values => {
    const known = values.filter(Number.isFinite), low = Math.min(...known), high = Math.max(...known);
    const margin = (high - low || Math.abs(high) || 1) * 0.04;
    return [low - margin, high + margin];
  };
  const [x0, x1] = range(xs), [y0, y1] = range(ys);
  const x = value => left + (value - x0) / (x1 - x0) * (width - left - right);
  const y = value => height - bottom - (value - y0) / (y1 - y0) * (height - top - bottom);
  const svg = picture(parent, frame, `${yTitle} against ${xTitle}`, xTitle, yTitle);
  for (const at of ticks(x0, x1, (width - left - right) / 60)) {
    element(svg, "text", { x: x(at), y: height - 6, "text-anchor": "middle" }, at.toLocaleString("en"));
  }
  for (const at of ticks(y0, y1)) {
    element(svg, "path", { class: "grid", d: `M${left} ${y(at)}H${width - right}` });
    element(svg, "text", { x: left - 8, y: y(at) + 4, "text-anchor": "end" }, number(at));
  }
  return { svg, x, y, frame };
}

// Returns a chart with a row for each name on a logarithmic axis, which goes from the past, if there is one, to the future.
// Names stand before their rows, or above them where that would leave too little.
function rowChart(parent, names, [past, future], xTitle, label) {
  const width = parent.clientWidth, room = 16 + LETTER * Math.max(...names.map(name => name.length)), above = room > width / 4;
  const gap = above ? 38 : 22, left = above ? 12 : room, frame = { ...FRAME, width, left, height: FRAME.top + names.length * gap + FRAME.bottom };
  const { height, right, top, bottom } = frame, start = -Math.log1p(past), end = Math.log1p(future);
  const x = lag => left + 8 + (Math.sign(lag) * Math.log1p(Math.abs(lag)) - start) / (end - start) * (width - left - right - 16);
  const y = index => top + (index + 1) * gap - 11;
  const svg = picture(parent, frame, label, xTitle);
  svg.classList.add("rows");
  const distances = [1, 3, 10, 30, 100, 300, 1000, 3000, 10000, 30000, 100000];
  let last = -Infinity;
  for (const at of [...distances.map(each => -each).reverse(), 0, ...distances].filter(each => each >= -past && each <= future)) {
    element(svg, "path", { class: "grid", d: `M${x(at)} ${top}V${height - bottom}` });
    const words = at.toLocaleString("en"), half = words.length * LETTER / 2 + 2;
    if (x(at) - half < last) continue;
    element(svg, "text", { x: x(at), y: height - 6, "text-anchor": "middle" }, words);
    last = x(at) + half;
  }
  names.forEach((name, index) => element(svg, "text", above ? { x: left, y: y(index) - 15 } : { x: left - 6, y: y(index) + 4, "text-anchor": "end" }, name));
  return { svg, x, y, frame, gap };
}

// Lets a chart be read at some places, by pointer and by keys: rows where it has them. `pick` is told of a click, and of Enter.
function readable({ svg, frame, gap }, places, start, show, pick = null) {
  const cursor = element(svg, "path", { class: "cursor" }), [back, forth] = gap ? ["ArrowUp", "ArrowDown"] : ["ArrowLeft", "ArrowRight"];
  let at = start;
  const move = index => {
    at = Math.max(0, Math.min(places.length - 1, index));
    const outline = gap && `M${frame.left} ${places[at] + 11 - gap}H${frame.width - frame.right}v${gap}H${frame.left}Z`;
    cursor.setAttribute("d", outline || `M${places[at]} ${frame.top}V${frame.height - frame.bottom}`);
    show(at);
  };
  svg.setAttribute("tabindex", "0");
  const follow = event => {
    const box = svg.getBoundingClientRect();
    const place = gap ? (event.clientY - box.top) / box.height * frame.height : (event.clientX - box.left) / box.width * frame.width;
    move(places.reduce((best, each, index) => Math.abs(each - place) < Math.abs(places[best] - place) ? index : best, 0));
  };
  // A finger that taps does not move.
  for (const name of ["pointermove", "pointerdown"]) svg.addEventListener(name, follow);
  svg.addEventListener("keydown", event => {
    const step = { [back]: -1, [forth]: 1 }[event.key];
    if (step) { event.preventDefault(); move(at + step); }
    if (pick && event.key === "Enter") pick(at);
  });
  if (pick) svg.addEventListener("click", () => pick(at));
  move(at);
}

// Returns rising places, moved as little as makes them a gap apart: those that are too near make a block around their middle.
function spread(places, gap) {
  const mean = block => block.reduce((sum, each) => sum + each, 0) / block.length, blocks = [];
  places.forEach((place, index) => {
    blocks.push([place - index * gap]);
    while (blocks.length > 1 && mean(blocks.at(-2)) > mean(blocks.at(-1))) blocks.push(blocks.splice(-2).flat());
  });
  return blocks.flatMap(block => block.map(() => mean(block))).map((start, index) => start + index * gap);
}

// Writes a name beside a point, or further up or down with a line to it.
function writeName(label, y) {
  if (Math.abs(y - label.y) > 3) element(label.parent, "path", { class: "lead", d: `M${label.from} ${label.y}L${label.x - 2} ${y}` });
  element(label.parent, "text", { x: label.x, y: y + 4 }, label.name);
}

function series(svg, index) {
  return element(svg, "g", { class: "series", style: `--own: var(--c${index % COLOURS})`, "stroke-dasharray": DASHES[index % DASHES.length] });
}

// Writes what is read at a place of a chart: where it is, and values with their names.
function tell(output, title, values) {
  output.replaceChildren();
  element(output, "b", {}, title);
  for (const [name, value] of values) element(element(output, "span", {}, `${name} `), "b", {}, value);
}

// Writes the names of curves in lines below a chart.
function legend(parent, names) {
  const list = element(parent, "ul", { class: "legend", "aria-label": "Curves" });
  for (const [index, name] of names.entries()) {
    const item = element(list, "li");
    element(series(element(item, "svg", { width: 28, height: 8, "aria-hidden": "true" }), index), "path", { d: "M0 4H28" });
    element(item, "span", {}, name);
  }
}

// Returns a chart of curves with their names at their ends, or below it where that would leave too little.
// Points are [x, value], or [x, value, low, high] where there is a band; `more` are values that the axis has to hold too.
function namedChart(parent, curves, xTitle, yTitle, more = []) {
  const names = curves.map(({ name }) => name), room = 20 + LETTER * Math.max(...names.map(name => name.length)), width = parent.clientWidth;
  const beside = room < width / 4 && LINE * names.length < width / 2, height = Math.max(400, LINE * names.length + 40);
  const all = curves.flatMap(({ points }) => points), values = all.flatMap(point => point.slice(1)).concat(more);
  const figure = chart(parent, all.map(point => point[0]), values, xTitle, yTitle, { height, ...(beside && { right: room }) });
  const { svg, x, y, frame } = figure, labels = [];
  curves.forEach(({ name, points }, index) => {
    const known = points.filter(p => p.every(Number.isFinite));
    if (!known.length) return;
    const parent = series(svg, index), path = (list, column) => list.map(p => `${x(p[0]).toFixed(1)} ${y(p[column]).toFixed(1)}`).join("L");
    if (known[0].length > 2) element(parent, "path", { class: "band", d: `M${path(known, 2)}L${path([...known].reverse(), 3)}Z` });
    element(parent, "path", { d: `M${path(known, 1)}`, "data-name": name });
    const last = known.at(-1);
    labels.push({ parent, name, x: frame.width - frame.right + 12, from: x(last[0]), y: y(last[1]) });
  });
  if (beside) nameEnds(labels, frame.height);
  else legend(parent, names);
  return figure;
}

function nameEnds(labels, height) {
  labels.sort((a, b) => a.y - b.y);
  const places = spread(labels.map(label => label.y), LINE), half = LINE / 2;
  const move = Math.max(0, half - places[0]) || Math.min(0, height - half - places.at(-1));
  labels.forEach((label, index) => writeName(label, places[index] + move));
}
