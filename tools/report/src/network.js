// The network as a layered graph in SVG: zoom with the wheel, move with the mouse, walk with the arrow keys.
import dagre from "@dagrejs/dagre";
import { select } from "d3-selection";
import { zoom, zoomIdentity } from "d3-zoom";

const SVG = "http://www.w3.org/2000/svg";
const LARGE = 400; // nodes; from here on the layout takes the fast ranking
const HEIGHT = 44;
const still = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

export class Network {
  constructor(holder, data, onChoose) {
    this.holder = holder;
    this.data = data;
    this.onChoose = onChoose;
    this.byName = new Map(data.nodes.map((node) => [node.name, node]));
    this.elements = new Map();
    this.matches = [];
    this.place();
    this.draw();
  }

  place() {
    const graph = new dagre.graphlib.Graph();
    const ranker = this.data.nodes.length > LARGE ? "longest-path" : "network-simplex";
    graph.setGraph({ rankdir: "TB", nodesep: 24, ranksep: 36, marginx: 16, marginy: 16, ranker });
    graph.setDefaultEdgeLabel(() => ({}));
    const maker = new Map(this.data.nodes.map((node) => [node.output, node.name]));
    this.edges = [];
    for (const node of this.data.nodes) {
      const width = Math.min(260, Math.max(90, 22 + 7.2 * Math.max(node.name.length, node.op.length + 11)));
      graph.setNode(node.name, { width, height: HEIGHT });
    }
    for (const node of this.data.nodes)
      for (const input of new Set(node.inputs)) {
        const from = maker.get(input);
        if (from !== undefined && from !== node.name) this.edges.push([from, node.name]);
      }
    for (const [from, to] of this.edges) graph.setEdge(from, to);
    dagre.layout(graph);
    this.layout = graph;
    this.size = graph.graph();
  }

  draw() {
    const svg = element("svg", { role: "group", "aria-label": "The network; move with the arrow keys and open a node with Enter" });
    const marker = element("marker", { id: "arrow", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto" });
    marker.append(element("path", { d: "M0,0 L8,4 L0,8 z", class: "tip" }));
    const defs = element("defs");
    defs.append(marker);
    this.view = element("g");
    svg.append(defs, this.view);
    for (const [from, to] of this.edges) {
      const { points } = this.layout.edge(from, to);
      this.view.append(element("path", { d: curve(points), class: "edge", "marker-end": "url(#arrow)" }));
    }
    for (const node of this.data.nodes) this.view.append(this.box(node));
    this.holder.append(svg);
    this.svg = svg;
    this.zoom = zoom().scaleExtent([0.02, 4]).on("zoom", (event) => this.view.setAttribute("transform", event.transform));
    select(svg).call(this.zoom).on("dblclick.zoom", null);
    const first = this.data.nodes[0];
    if (first) this.elements.get(first.name).setAttribute("tabindex", "0");
    svg.addEventListener("keydown", (event) => this.key(event));
    this.start();
    new ResizeObserver(() => this.resized()).observe(this.holder);
  }

  box(node) {
    const { x, y, width, height } = this.layout.node(node.name);
    const group = element("g", {
      class: `node${node.first ? " first" : ""}`,
      transform: `translate(${x - width / 2},${y - height / 2})`,
      tabindex: "-1",
      role: "button",
      "data-name": node.name,
    });
    const rect = element("rect", { width, height, rx: 6 });
    const name = element("text", { x: 10, y: 18, class: "name" });
    name.textContent = short(node.name, Math.floor((width - 18) / 7.2));
    const value = element("text", { x: 10, y: 35, class: "value" });
    group.append(rect, name, value);
    if (name.textContent !== node.name) {
      const title = element("title");
      title.textContent = node.name;
      group.prepend(title);
    }
    group.addEventListener("click", () => this.choose(node.name));
    this.elements.set(node.name, group);
    return group;
  }

  colour(measure) {
    this.measure = measure;
    const values = this.data.nodes.map((node) => node.measures[measure?.key]).filter((v) => v !== null && v !== undefined);
    const [low, high] = [Math.min(...values), Math.max(...values)];
    const wide = values.length > 0 && low >= 0 && high / Math.max(low, 1) > 100;
    const scaled = (v) => (wide ? Math.log1p(v) : v);
    const span = scaled(high) - scaled(low);
    this.legend = values.length ? `From ${show(low, measure)} to ${show(high, measure)}.` : "No node has a value for this measure.";
    if (values.length && measure.bad) this.legend += ` The stronger the colour, the ${measure.bad === "low" ? "lower" : "higher"} the value.`;
    for (const node of this.data.nodes) {
      const group = this.elements.get(node.name);
      const value = node.measures[measure?.key];
      const known = value !== null && value !== undefined;
      let part = known && span > 0 ? (scaled(value) - scaled(low)) / span : known && measure.bad === "high" && value > 0 ? 1 : 0;
      if (known && measure.bad === "low" && span > 0) part = 1 - part;
      group.style.setProperty("--part", `${Math.round(part * 60)}%`);
      group.classList.toggle("plain", !measure?.bad);
      group.classList.toggle("unknown", !known);
      const text = known ? show(value, measure) : "";
      group.querySelector(".value").textContent = text ? `${short(node.op, 16)} · ${text}` : short(node.op, 30);
    }
  }

  // The node that most deserves a look under the first measure, or simply the first one.
  worst() {
    const measure = this.data.measures[0];
    const known = this.data.nodes.filter((node) => measure?.bad && typeof node.measures[measure.key] === "number");
    const sign = measure?.bad === "low" ? 1 : -1;
    known.sort((a, b) => sign * (a.measures[measure.key] - b.measures[measure.key]));
    return known[0] || this.data.nodes[0];
  }

  search(text) {
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    this.matches = [];
    for (const node of this.data.nodes) {
      const all = [node.name, node.op, node.location, node.source].join(" ").toLowerCase();
      const hit = words.every((word) => all.includes(word));
      this.elements.get(node.name).classList.toggle("dim", !hit);
      if (hit && words.length) this.matches.push(node);
    }
    this.at = -1;
    if (this.matches.length) this.centre(this.matches[0].name);
    return this.matches.length;
  }

  next(step) {
    if (!this.matches.length) return;
    this.at = (this.at + step + this.matches.length) % this.matches.length;
    this.choose(this.matches[this.at].name, { quiet: true });
  }

  choose(name, { quiet = false } = {}) {
    const node = this.byName.get(name);
    if (!node) return;
    for (const [other, group] of this.elements) {
      group.classList.toggle("chosen", other === name);
      group.setAttribute("tabindex", other === name ? "0" : "-1");
      if (other === name) group.setAttribute("aria-pressed", "true");
      else group.removeAttribute("aria-pressed");
    }
    this.current = name;
    this.onChoose(node);
    this.reveal(name);
    if (!quiet) this.elements.get(name).focus({ preventScroll: true });
  }

  focus(name) {
    this.elements.get(name)?.focus({ preventScroll: true });
  }

  key(event) {
    const name = event.target.dataset?.name;
    if (!name) return;
    const act = {
      Enter: () => this.choose(name),
      " ": () => this.choose(name),
      "+": () => this.zoomBy(1.4),
      "-": () => this.zoomBy(1 / 1.4),
      0: () => this.fit(),
      ArrowDown: () => this.walk(name, 0, 1),
      ArrowUp: () => this.walk(name, 0, -1),
      ArrowRight: () => this.walk(name, 1, 0),
      ArrowLeft: () => this.walk(name, -1, 0),
      Home: () => this.move(this.data.nodes[0].name),
      End: () => this.move(this.data.nodes.at(-1).name),
    }[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  }

  // Along an edge up or down; left and right to the nearest node of about the same height.
  walk(name, dx, dy) {
    const here = this.layout.node(name);
    let names = dy > 0 ? this.layout.successors(name) : dy < 0 ? this.layout.predecessors(name) : this.layout.nodes();
    names = names.filter((other) => {
      const there = this.layout.node(other);
      return dy ? true : Math.abs(there.y - here.y) < HEIGHT * 1.5 && (there.x - here.x) * dx > 0;
    });
    const far = (other) => Math.abs(this.layout.node(other).x - here.x);
    names.sort((a, b) => far(a) - far(b));
    if (names.length) this.move(names[0]);
  }

  move(name) {
    for (const [other, group] of this.elements) group.setAttribute("tabindex", other === name ? "0" : "-1");
    this.focus(name);
    this.reveal(name);
  }

  start() {
    const { width } = this.holder.getBoundingClientRect();
    const scale = Math.max(this.fitting(), Math.min(0.9, width / this.size.width));
    const x = (width - this.size.width * scale) / 2;
    select(this.svg).call(this.zoom.transform, zoomIdentity.translate(x, 8).scale(scale));
  }

  // A change of the holder's size, as in print or on a turned phone, keeps the chosen node in view.
  resized() {
    if (this.current) this.reveal(this.current);
  }

  fitting() {
    const { width, height } = this.holder.getBoundingClientRect();
    return Math.min(1.2, width / this.size.width, height / this.size.height) || 1;
  }

  fit() {
    const { width, height } = this.holder.getBoundingClientRect();
    const scale = this.fitting();
    const [x, y] = [(width - this.size.width * scale) / 2, (height - this.size.height * scale) / 2];
    select(this.svg).call(this.zoom.transform, zoomIdentity.translate(x, y).scale(scale));
  }

  zoomBy(factor) {
    select(this.svg).call(this.zoom.scaleBy, factor);
  }

  centre(name) {
    const { x, y } = this.layout.node(name);
    select(this.svg).call(this.zoom.translateTo, x, y);
  }

  reveal(name) {
    const box = this.elements.get(name).getBoundingClientRect();
    const frame = this.holder.getBoundingClientRect();
    const inside = box.left >= frame.left && box.right <= frame.right && box.top >= frame.top && box.bottom <= frame.bottom;
    if (!inside) this.centre(name);
    if (!still()) this.elements.get(name).classList.add("shown");
  }
}

export function show(value, measure) {
  const size = Math.abs(value);
  const digits = Number.isInteger(value) || size >= 1000 ? 0 : size >= 100 ? 1 : size >= 1 ? 2 : 4;
  const text = value.toLocaleString("en-US", { maximumFractionDigits: digits });
  const unit = measure?.unit || "";
  return unit === "%" ? `${text}%` : unit ? `${text} ${unit}` : text;
}

function short(text, room) {
  return text.length <= room ? text : `${text.slice(0, Math.ceil(room / 2) - 1)}…${text.slice(text.length - Math.floor(room / 2))}`;
}

function curve(points) {
  let path = `M${points[0].x},${points[0].y}`;
  for (let i = 1; i < points.length - 1; i++) {
    const [here, next] = [points[i], points[i + 1]];
    const end = i === points.length - 2 ? next : { x: (here.x + next.x) / 2, y: (here.y + next.y) / 2 };
    path += ` Q${here.x},${here.y} ${end.x},${end.y}`;
  }
  return points.length === 2 ? `${path} L${points[1].x},${points[1].y}` : path;
}

function element(name, attributes = {}) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}
