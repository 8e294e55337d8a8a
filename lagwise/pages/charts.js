const DASHES = ["none", "7 4", "8 3 2 3", "2 3"];
const FRAME = { width: 900, height: 320, left: 64, right: 16, top: 12, bottom: 44 };
const NAMED = { ...FRAME, height: 400, right: 130 };
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

function ticks(low, high) {
  const rough = (high - low) / 6 || 1, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find(each => each * power >= rough);
  const found = [];
  for (let at = Math.ceil(low / step); at * step <= high + step * 1e-6; at++) found.push(+(at * step).toPrecision(12));
  return found;
}

// Returns a chart with axes, and the functions from values to places in it.
function chart(parent, xs, ys, xTitle, yTitle, frame = FRAME) {
  const { width, height, left, right, top, bottom } = frame;
  const range = values => {
    const known = values.filter(Number.isFinite), low = Math.min(...known), high = Math.max(...known);
    const margin = (high - low || Math.abs(high) || 1) * 0.04;
    return [low - margin, high + margin];
  };
  const [x0, x1] = range(xs), [y0, y1] = range(ys);
  const x = value => left + (value - x0) / (x1 - x0) * (width - left - right);
  const y = value => height - bottom - (value - y0) / (y1 - y0) * (height - top - bottom);
  parent.replaceChildren();
  const svg = element(parent, "svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${yTitle} against ${xTitle}` });
  for (const at of ticks(x0, x1)) {
    element(svg, "text", { x: x(at), y: height - bottom + 18, "text-anchor": "middle" }, at.toLocaleString("en"));
  }
  for (const at of ticks(y0, y1)) {
    element(svg, "path", { class: "grid", d: `M${left} ${y(at)}H${width - right}` });
    element(svg, "text", { x: left - 8, y: y(at) + 4, "text-anchor": "end" }, number(at));
  }
  element(svg, "text", { x: (left + width - right) / 2, y: height - 6, "text-anchor": "middle" }, xTitle);
  element(svg, "text", { transform: `translate(14 ${(height - bottom) / 2}) rotate(-90)`, "text-anchor": "middle" }, yTitle);
  return { svg, x, y, frame };
}

// Returns a chart with a row for each name on a logarithmic axis, which goes from the past, if there is one, to the future.
function rowChart(parent, names, [past, future], xTitle, label) {
  const gap = 22, left = 16 + 7 * Math.max(6, ...names.map(name => name.length)), frame = { ...FRAME, left, height: FRAME.top + names.length * gap + FRAME.bottom };
  const { width, height, right, top, bottom } = frame, start = -Math.log1p(past), end = Math.log1p(future);
  const x = lag => left + 8 + (Math.sign(lag) * Math.log1p(Math.abs(lag)) - start) / (end - start) * (width - left - right - 16);
  const y = index => top + (index + 0.5) * gap;
  parent.replaceChildren();
  const svg = element(parent, "svg", { class: "chart rows", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  const distances = [1, 3, 10, 30, 100, 300, 1000, 3000, 10000, 30000, 100000];
  for (const at of [...distances.map(each => -each), 0, ...distances].filter(each => each >= -past && each <= future)) {
    element(svg, "path", { class: "grid", d: `M${x(at)} ${top}V${height - bottom}` });
    element(svg, "text", { x: x(at), y: height - bottom + 18, "text-anchor": "middle" }, at.toLocaleString("en"));
  }
  names.forEach((name, index) => element(svg, "text", { x: left - 6, y: y(index) + 4, "text-anchor": "end" }, name));
  element(svg, "text", { x: (left + width - right) / 2, y: height - 6, "text-anchor": "middle" }, xTitle);
  return { svg, x, y, frame, gap };
}

// Lets a chart be read at some places, by pointer and by keys: rows where it has them. `pick` is told of a click, and of Enter.
function readable({ svg, frame, gap }, places, start, show, pick = null) {
  const cursor = element(svg, "path", { class: "cursor" }), [back, forth] = gap ? ["ArrowUp", "ArrowDown"] : ["ArrowLeft", "ArrowRight"];
  let at = start;
  const move = index => {
    at = Math.max(0, Math.min(places.length - 1, index));
    const outline = gap && `M${frame.left} ${places[at] - gap / 2}H${frame.width - frame.right}v${gap}H${frame.left}Z`;
    cursor.setAttribute("d", outline || `M${places[at]} ${frame.top}V${frame.height - frame.bottom}`);
    show(at);
  };
  svg.setAttribute("tabindex", "0");
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect();
    const place = gap ? (event.clientY - box.top) / box.height * frame.height : (event.clientX - box.left) / box.width * frame.width;
    move(places.reduce((best, each, index) => Math.abs(each - place) < Math.abs(places[best] - place) ? index : best, 0));
  });
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

// Draws curves with their names at their ends. Points are [x, value], or [x, value, low, high] where there is a band.
function drawNamed({ svg, x, y, frame }, curves) {
  const labels = [];
  curves.forEach(({ name, points }, index) => {
    const known = points.filter(p => p.every(Number.isFinite));
    if (!known.length) return;
    const parent = series(svg, index), path = (list, column) => list.map(p => `${x(p[0]).toFixed(1)} ${y(p[column]).toFixed(1)}`).join("L");
    if (known[0].length > 2) element(parent, "path", { class: "band", d: `M${path(known, 2)}L${path([...known].reverse(), 3)}Z` });
    element(parent, "path", { d: `M${path(known, 1)}`, "data-name": name });
    const last = known.at(-1);
    labels.push({ parent, name, x: frame.width - frame.right + 12, from: x(last[0]), y: y(last[1]) });
  });
  labels.sort((a, b) => a.y - b.y);
  const places = spread(labels.map(label => label.y), 14);
  labels.forEach((label, index) => writeName(label, places[index]));
}
