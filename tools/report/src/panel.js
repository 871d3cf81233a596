// What a chosen node says: its facts, the user's line, and each of its tensors with its histogram and its scales.
import { accumulator, histogram, scales } from "./plots.js";
import { show } from "./network.js";

export class Panel {
  constructor(holder, data) {
    this.holder = holder;
    this.data = data;
  }

  show(node, back) {
    const parts = [make("h3", node.name), make("p", node.op, "note")];
    if (node.location) {
      const where = make("p", "", "where");
      where.append(make("span", node.location, "note"));
      if (node.source) where.append(make("code", node.source));
      parts.push(where);
    }
    if (node.text) parts.push(make("p", node.text, "text"));
    parts.push(this.measures(node));
    if (node.other !== undefined) parts.push(this.sides(node));
    if (this.data.kind === "pair") {
      parts.push(...this.tensors(node.tensors, "", `${this.data.labels[0]}: `));
      parts.push(...this.tensors(node.other_tensors || [], "b/", `${this.data.labels[1]}: `));
    } else parts.push(...this.tensors(node.tensors, "", ""));
    if (node.accumulator) parts.push(make("h4", "Accumulator"), accumulator(node.accumulator));
    if (node.other === undefined && node.facts.length) parts.push(make("h4", "How it is computed"), list(node.facts));
    this.holder.replaceChildren(...parts.filter(Boolean));
    this.holder.scrollTop = 0;
    this.holder.onkeydown = (event) => {
      if (event.key === "Escape") back();
    };
  }

  measures(node) {
    const known = this.data.measures
      .map((measure) => [measure.label, node.measures[measure.key], measure])
      .filter(([, value]) => value !== null && value !== undefined)
      .map(([label, value, measure]) => [label, show(value, measure)]);
    return known.length ? list(known, "figures") : null;
  }

  sides(node) {
    const table = document.createElement("table");
    table.className = "sides";
    const head = table.createTHead().insertRow();
    for (const name of ["", ...this.data.labels]) {
      const cell = make("th", name);
      cell.scope = "col";
      head.append(name ? cell : document.createElement("td"));
    }
    const others = new Map(node.other || []);
    const body = table.createTBody();
    for (const [label, value] of node.facts) {
      const row = body.insertRow();
      const cell = make("th", label);
      cell.scope = "row";
      const theirs = others.has(label) ? others.get(label) : "-";
      row.append(cell, make("td", value), make("td", theirs));
      if (theirs !== value) row.className = "differs";
    }
    return table;
  }

  tensors(names, prefix, label) {
    return names.flatMap((name) => {
      const tensor = this.data.tensors[prefix + name];
      if (!tensor) return [];
      const section = document.createElement("div");
      section.className = "tensor";
      const grid = tensor.bits === null ? "" : `, codes ${tensor.qmin} to ${tensor.qmax}`;
      section.append(
        make("h4", `${label}${tensor.name}`),
        make("p", `${tensor.kind}, ${tensor.dtype}, ${tensor.shape.join(" x ") || "scalar"}${grid}`, "note"),
      );
      if (tensor.histogram) section.append(histogram(tensor));
      if (tensor.scale?.length > 1) section.append(scales(tensor));
      const figures = [...tensor.figures];
      if (tensor.scale?.length === 1) figures.unshift(["scale", String(tensor.scale[0])]);
      if (tensor.zero_point) figures.push(["zero point", [...new Set(tensor.zero_point)].join(" to ")]);
      section.append(list(figures));
      return [section];
    });
  }
}

function list(pairs, name = "") {
  const made = document.createElement("dl");
  made.className = name;
  for (const [label, value] of pairs) {
    const group = document.createElement("div");
    group.append(make("dt", label), make("dd", value));
    made.append(group);
  }
  return made;
}

export function make(name, text, className = "") {
  const made = document.createElement(name);
  made.textContent = text;
  if (className) made.className = className;
  return made;
}
