// The page round the drawing: time, keys, fingers, marks and charts.
const byId = (id) => document.getElementById(id);
const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const SPEEDS = [0.1, 0.25, 0.5, 1, 2, 4];
const last = Math.max(...DATA.lanes.map((lane) => lane.steps));
const REST = 1.2;
const state = { time: 0, playing: false, speed: 1, stale: true, rest: 0, before: 0 };

byId("title").textContent = DATA.title;
byId("facts").textContent = DATA.facts;
byId("made").textContent = DATA.made;
byId("scrub").max = last;
for (const speed of SPEEDS) byId("speed").add(new Option(`${speed}×`, speed, speed === 1, speed === 1));

const labels = DATA.lanes.map((lane) => {
  const box = document.createElement("div"), name = document.createElement("b"), result = document.createElement("i");
  box.className = "lane";
  name.textContent = lane.name;
  box.append(name, result);
  byId("lanes").append(box);
  return result;
});

let drawing = null;
const pictures = DATA.lanes.map((lane) => (lane.pictures || []).map((source) => Object.assign(new Image(), { src: source, onload: () => (state.stale = true) })));
if (DATA.lanes[0].poses) {
  try {
    drawing = new Drawing(byId("view"), DATA);
    drawing.shows = true;
  } catch (error) {
    byId("note").textContent = error.message;
    byId("note").hidden = false;
  }
} else {
  byId("home").hidden = true;
  if (!pictures[0].length) Object.assign(byId("note"), { textContent: "This environment has no images; its numbers are below.", hidden: false });
}

function drawPictures() {
  const canvas = byId("view"), ratio = window.devicePixelRatio || 1, pen = canvas.getContext("2d");
  Object.assign(canvas, { width: canvas.clientWidth * ratio, height: canvas.clientHeight * ratio });
  const across = canvas.width / canvas.height > 0.9, n = pictures.length;
  pictures.forEach((list, i) => {
    const lane = DATA.lanes[i], image = list[Math.min(Math.floor(state.time / lane.stride), list.length - 1)];
    if (!image || !image.naturalWidth) return;
    const [w, h] = across ? [canvas.width / n, canvas.height] : [canvas.width, canvas.height / n];
    const scale = Math.min(w / image.naturalWidth, h / image.naturalHeight) * 0.94;
    const [wide, high] = [image.naturalWidth * scale, image.naturalHeight * scale];
    pen.imageSmoothingEnabled = scale < 3;
    pen.drawImage(image, (across ? i * w : 0) + (w - wide) / 2, (across ? 0 : i * h) + (h - high) / 2, wide, high);
  });
}

function show() {
  if (drawing) drawing.draw(state.time);
  else if (pictures[0].length) drawPictures();
  const step = Math.floor(state.time + 1e-6);
  byId("clock").textContent = `step ${step} of ${last} · ${(state.time * DATA.dt).toFixed(2)} s`;
  byId("scrub").value = state.time;
  byId("scrub").setAttribute("aria-valuetext", byId("clock").textContent);
  byId("play").querySelector("path").setAttribute("d", state.playing ? "M4 3h3v10H4zM9 3h3v10H9z" : "M4 2.5v11L13 8z");
  DATA.lanes.forEach((lane, i) => {
    const won = lane.wins.some((win) => win <= step), over = step >= lane.steps;
    const at = Math.round((lane.returns.length - 1) * Math.min(step / Math.max(lane.steps, 1), 1));
    const outcome = won ? "✓ success" : over && lane.judged ? "✗ no success" : over ? lane.end : "";
    labels[i].textContent = [outcome, `return ${Number(lane.returns[at].toPrecision(3))}`].filter(Boolean).join(" · ");
    labels[i].className = won ? "won" : over && lane.judged ? "lost" : "";
  });
  charts.forEach((chart) => chart());
  marks();
  state.stale = false;
}

function seek(time) {
  state.time = Math.min(last, Math.max(0, time));
  state.rest = 0;
  state.stale = true;
}

function play(on = !state.playing) {
  state.playing = on;
  if (on && state.time >= last) seek(0);
  state.stale = true;
}

function tempo(speed) {
  state.speed = SPEEDS.includes(speed) ? speed : 1;
  byId("speed").value = state.speed;
}

function frame(now) {
  const passed = Math.min((now - state.before) / 1000, 0.1);
  state.before = now;
  if (state.playing && state.time < last) {
    state.time = Math.min(last, state.time + (passed * state.speed) / DATA.dt);
    state.stale = true;
  } else if (state.playing && (state.rest += passed) > REST) seek(0);
  if (state.stale) show();
  requestAnimationFrame(frame);
}

function marks() {
  const canvas = byId("marks"), pen = prepare(canvas), wide = canvas.clientWidth, high = canvas.clientHeight;
  const x = (step) => 8 + (step / Math.max(last, 1)) * (wide - 16);
  DATA.lanes.forEach((lane, i) => {
    pen.fillStyle = style("--won");
    for (const win of lane.wins) {
      pen.save();
      pen.translate(x(win), DATA.lanes.length > 1 && i ? high - 4 : 4);
      pen.rotate(Math.PI / 4);
      pen.fillRect(-3.5, -3.5, 7, 7);
      pen.restore();
    }
    pen.fillStyle = style("--soft");
    if (lane.steps < last) pen.fillRect(x(lane.steps), high / 2 - 8, 1.5, 16);
  });
}

function prepare(canvas) {
  const ratio = window.devicePixelRatio || 1, wide = canvas.clientWidth, high = canvas.clientHeight;
  if (canvas.width !== Math.round(wide * ratio)) Object.assign(canvas, { width: Math.round(wide * ratio), height: Math.round(high * ratio) });
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, wide, high);
  return pen;
}

// One chart of named curves over the steps; the second lane's are dashed.
function makeChart({ title, curves, stacked }) {
  const figure = document.createElement("figure"), caption = document.createElement("figcaption"), canvas = document.createElement("canvas");
  caption.innerHTML = "<b></b>";
  caption.firstChild.textContent = title;
  curves.forEach((curve, i) => {
    const word = document.createElement("span");
    word.textContent = curve.name;
    word.style.color = `var(--c${curve.colour ?? i % 7})`;
    if (curves.length > 1) caption.append(word);
  });
  figure.append(caption, canvas);
  byId("charts").append(figure);
  canvas.addEventListener("pointerdown", (event) => seek(((event.offsetX - 34) / (canvas.clientWidth - 42)) * last));
  const every = curves.flatMap((curve) => curve.values).filter(Number.isFinite);
  const tops = stacked ? curves[0].values.map((_, t) => curves.reduce((sum, c) => sum + Math.max(c.values[t] || 0, 0), 0)) : every;
  const lows = stacked ? curves[0].values.map((_, t) => curves.reduce((sum, c) => sum + Math.min(c.values[t] || 0, 0), 0)) : every;
  let low = Math.min(0, ...lows), high = Math.max(0, ...tops);
  if (high - low < 1e-9) high = low + 1;
  return () => {
    const pen = prepare(canvas), wide = canvas.clientWidth, tall = canvas.clientHeight;
    const x = (step) => 34 + (step / Math.max(last, 1)) * (wide - 42), y = (value) => 6 + ((high - value) / (high - low)) * (tall - 14);
    pen.font = "10px system-ui, sans-serif";
    pen.fillStyle = style("--soft");
    pen.strokeStyle = style("--line");
    pen.lineWidth = 1;
    for (const value of low < 0 && high > 0 ? [low, 0, high] : [low, high]) {
      pen.fillText(Number(value.toPrecision(2)), 0, y(value) + 3);
      pen.beginPath();
      pen.moveTo(34, y(value));
      pen.lineTo(wide - 8, y(value));
      pen.stroke();
    }
    if (stacked) stack(pen, curves, x, y);
    else curves.forEach((curve, i) => line(pen, curve, `--c${curve.colour ?? i % 7}`, x, y));
    pen.fillStyle = style("--ink");
    pen.fillRect(x(state.time) - 0.75, 2, 1.5, tall - 6);
  };
}

function line(pen, curve, colour, x, y) {
  pen.strokeStyle = style(colour);
  pen.lineWidth = 1.8;
  pen.setLineDash(curve.dashed ? [5, 3] : []);
  pen.beginPath();
  let down = false;
  curve.values.forEach((value, t) => {
    if (!Number.isFinite(value)) return (down = false);
    pen[down ? "lineTo" : "moveTo"](x(curve.steps[t]), y(value));
    down = true;
  });
  pen.stroke();
  pen.setLineDash([]);
}

function stack(pen, curves, x, y) {
  const up = curves[0].values.map(() => 0), down = [...up];
  curves.forEach((curve, i) => {
    pen.fillStyle = style(`--c${i % 7}`);
    curve.values.forEach((value, t) => {
      const base = value >= 0 ? up : down, from = base[t];
      base[t] += value || 0;
      const wide = Math.max(1, x(curve.steps[1] ?? 1) - x(curve.steps[0] ?? 0) - 0.5);
      pen.fillRect(x(curve.steps[t]) - wide, Math.min(y(from), y(base[t])), wide, Math.abs(y(base[t]) - y(from)));
    });
  });
}

const charts = DATA.charts.map(makeChart);
const fingers = new Map();
byId("view").addEventListener("pointerdown", (event) => {
  fingers.set(event.pointerId, [event.clientX, event.clientY]);
  event.target.setPointerCapture(event.pointerId);
});
byId("view").addEventListener("pointermove", (event) => {
  const before = fingers.get(event.pointerId);
  if (!before || !drawing) return;
  const now = [event.clientX, event.clientY], dx = now[0] - before[0], dy = now[1] - before[1];
  if (fingers.size === 2) {
    const other = [...fingers].find(([id]) => id !== event.pointerId)[1];
    drawing.zoom(Math.hypot(before[0] - other[0], before[1] - other[1]) / Math.max(1, Math.hypot(now[0] - other[0], now[1] - other[1])));
    drawing.shift(dx / 2, dy / 2);
  } else if (event.buttons === 2 || event.shiftKey) drawing.shift(dx, dy);
  else drawing.turn(dx, dy);
  fingers.set(event.pointerId, now);
  state.stale = true;
});
for (const kind of ["pointerup", "pointercancel"]) byId("view").addEventListener(kind, (event) => fingers.delete(event.pointerId));
byId("view").addEventListener("contextmenu", (event) => event.preventDefault());
byId("view").addEventListener("wheel", (event) => {
  event.preventDefault();
  if (drawing) drawing.zoom(Math.exp(event.deltaY * 0.001));
  state.stale = true;
}, { passive: false });
byId("play").onclick = () => play();
byId("back").onclick = () => { play(false); seek(Math.ceil(state.time - 1e-6) - 1); };
byId("next").onclick = () => { play(false); seek(Math.floor(state.time + 1e-6) + 1); };
byId("home").onclick = () => { if (drawing) drawing.home(); state.stale = true; };
byId("speed").onchange = (event) => tempo(Number(event.target.value));
byId("scrub").oninput = (event) => { play(false); seek(Number(event.target.value)); };
const faster = (by) => tempo(SPEEDS[Math.min(SPEEDS.length - 1, Math.max(0, SPEEDS.indexOf(state.speed) + by))]);
const KEYS = {
  " ": () => play(), ArrowLeft: byId("back").onclick, ArrowRight: byId("next").onclick,
  Home: () => seek(0), End: () => seek(last), r: () => seek(0), "0": byId("home").onclick,
  "+": () => faster(1), "=": () => faster(1), "-": () => faster(-1),
  t: () => { if (drawing) drawing.shows = !drawing.shows; state.stale = true; },
};
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.tagName === "SELECT") return;
  const meant = KEYS[event.key] || KEYS[event.key.toLowerCase()];
  if (!meant) return;
  event.preventDefault();
  if (event.target.blur && event.target !== document.body) event.target.blur();
  meant();
});
new ResizeObserver(() => (state.stale = true)).observe(byId("stage"));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => (state.stale = true));
window.replay = { state, seek, play, tempo, last };
show();
play(true);
requestAnimationFrame((now) => { state.before = now; frame(now); });
