"use strict";
// What happens when somebody points at, moves to or presses something.

(() => {
  const story = JSON.parse(document.getElementById("story").textContent);
  const one = (id) => document.getElementById(id);
  const bytes = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const INFINITE = 65535;

  const opened = new Map(); // strand -> with its mask and scores as arrays
  const open = (strand) => {
    if (!opened.has(strand)) {
      const bits = bytes(strand.mask);
      const mask = Array.from({ length: strand.size }, (_, i) => (bits[i >> 3] >> (i & 7)) & 1);
      let scores = null;
      if (strand.scores) {
        const { low, high, codes } = strand.scores;
        const view = new DataView(bytes(codes).buffer);
        const step = (high - low || 1) / (INFINITE - 1);
        scores = Array.from({ length: strand.size }, (_, i) => view.getUint16(2 * i, true))
          .map((code) => (code === INFINITE ? Infinity : low + code * step));
      }
      opened.set(strand, { ...strand, mask, scores });
    }
    return opened.get(strand);
  };

  // a row of buttons of which one is pressed
  const choice = (id, names, act) => {
    const buttons = names.map((name, i) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = name;
      button.setAttribute("aria-pressed", String(i === 0));
      button.addEventListener("click", () => {
        buttons.forEach((other) => other.setAttribute("aria-pressed", String(other === button)));
        act(i);
      });
      return button;
    });
    one(id).replaceChildren(...buttons);
  };

  // A chart is drawn when it comes near to what is seen, so that a large report opens at once.
  const near = new Set();
  const drawn = new Set();
  const paint = (id) => {
    if (drawn.has(id)) return;
    drawn.add(id);
    painters[id]();
  };
  const again = (id) => { drawn.delete(id); if (near.has(id)) paint(id); };
  const painters = {
    "chart-layers": () => charts.layers(level, story.cut),
    "chart-curve": () => charts.curve(story.sweep),
    "chart-sensitivity": () => charts.sensitivity(story.sweep, chooseByName),
    "chart-axis": () => charts.axis(open(story.axes[chosen]), sorted),
    "chart-ties": () => { charts.ties(story.axes, story.modules, chooseByName); charts.mark(chosen); },
  };
  const watchCharts = () => {
    const { heights, reserve } = charts;
    reserve("chart-layers", Math.min(1000, heights.layers(level)));
    if (story.sweep) { reserve("chart-curve", heights.curve()); reserve("chart-sensitivity", heights.sensitivity(story.sweep)); }
    if (chosen >= 0) { reserve("chart-axis", heights.axis(story.axes[chosen])); reserve("chart-ties", heights.ties(story.axes)); }
    const eye = new IntersectionObserver((entries) => {
      for (const { target, isIntersecting } of entries) {
        if (isIntersecting) { near.add(target.id); paint(target.id); } else near.delete(target.id);
      }
    }, { rootMargin: "300px" });
    for (const chart of document.querySelectorAll(".chart")) eye.observe(chart);
    window.addEventListener("beforeprint", () => document.querySelectorAll(".chart").forEach((chart) => paint(chart.id)));
  };

  // layers
  let level = story.blocks || story.layers;
  if (story.blocks) choice("layers-level", ["Blocks", "Layers"], (i) => {
    level = [story.blocks, story.layers][i];
    again("chart-layers");
  });

  // axes
  const rows = [...document.querySelectorAll("#axes-list li")];
  const dims = [...document.querySelectorAll("#map .tied")];
  const dimsOf = story.axes.map(() => []);
  for (const dim of dims) for (const axis of story.ties[dim.dataset.tie]) dimsOf[axis].push(dim);
  let chosen = -1;
  let sorted = false;

  const light = (axes) => {
    for (const lit of document.querySelectorAll("#axes .lit")) lit.classList.remove("lit");
    for (const axis of axes) {
      rows[axis].classList.add("lit");
      for (const dim of dimsOf[axis]) {
        dim.classList.add("lit");
        dim.closest(".block").classList.add("lit");
      }
    }
  };
  const rest = () => light([chosen]);
  const count = (number, name) => `${number.toLocaleString("en")} ${name}${number === 1 ? "" : "s"}`;
  const ranges = (positions) => {
    const spans = [];
    for (const at of positions) {
      const last = spans[spans.length - 1];
      if (last && last[1] === at - 1) last[1] = at; else spans.push([at, at]);
    }
    return spans.map(([a, b]) => (a === b ? `${a}` : `${a}–${b}`)).join(", ");
  };

  const choose = (axis, follow) => {
    if (axis !== chosen) {
      const strand = story.axes[axis];
      if (chosen >= 0) rows[chosen].setAttribute("aria-selected", "false");
      chosen = axis;
      rows[axis].setAttribute("aria-selected", "true");
      enter(rows, rows[axis]);
      one("axis-name").textContent = strand.name;
      const gone = strand.size - strand.kept;
      const saved = gone ? ` Alone it saves ${strand.macs.toLocaleString("en")} MACs and ${count(strand.params, "parameter")}.` : "";
      const kind = strand.exact ? "The cut is exact." : `Inexact: ${strand.why}.`;
      one("axis-facts").textContent = `${strand.kept.toLocaleString("en")} of ${count(strand.size, "position")} kept, ` +
        `${count(strand.sites, "site")} in ${count(strand.modules.length, "module")}.${saved} ${kind}`;
      one("axis-removed").textContent = ranges(open(strand).mask.flatMap((kept, i) => (kept ? [] : [i]))) || "none";
      one("axis-order").hidden = !strand.scores;
      again("chart-axis");
      charts.mark(axis);
    }
    rest();
    if (follow) {
      const first = dimsOf[axis][0];
      if (first) one("map").scrollTop += first.getBoundingClientRect().top - one("map").getBoundingClientRect().top - 60;
    }
  };
  const chooseByName = (name) => {
    const axis = story.axes.findIndex((strand) => strand.name === name);
    if (axis >= 0) { choose(axis, true); rows[axis].scrollIntoView({ block: "nearest" }); }
  };

  // Of a list, the tabulator key enters one item; arrows go on from there.
  const entries = new Map();
  const enter = (items, item) => {
    if (entries.has(items)) entries.get(items).tabIndex = -1;
    if (item) { item.tabIndex = 0; entries.set(items, item); }
  };
  const keys = { ArrowDown: 1, ArrowUp: -1, ArrowRight: 1, ArrowLeft: -1, PageDown: 10, PageUp: -10, Home: -1e9, End: 1e9 };
  const step = (event, items, go) => {
    const at = items.indexOf(event.target);
    if (!(event.key in keys) || at < 0 || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    const next = items[Math.max(0, Math.min(items.length - 1, at + keys[event.key]))];
    next.focus();
    go(next);
  };

  const watchList = () => {
    const list = one("axes-list");
    const of = (event) => event.target.closest("li");
    list.addEventListener("mouseover", (event) => of(event) && light([+of(event).dataset.axis]));
    list.addEventListener("mouseleave", rest);
    list.addEventListener("click", (event) => of(event) && choose(+of(event).dataset.axis, true));
    list.addEventListener("focusin", (event) => of(event) && choose(+of(event).dataset.axis, true));
    list.addEventListener("keydown", (event) => step(event, rows.filter((row) => !row.hidden), () => {}));
    one("filter").addEventListener("input", () => {
      const wanted = one("filter").value.toLowerCase();
      for (const row of rows) row.hidden = !story.axes[+row.dataset.axis].name.toLowerCase().includes(wanted);
      enter(rows, rows[chosen].hidden ? rows.find((row) => !row.hidden) : rows[chosen]);
    });
  };
  const watchMap = () => {
    const map = one("map");
    const axesOf = (dim) => story.ties[dim.dataset.tie];
    const of = (event) => event.target.closest(".tied");
    enter(dims, dims[0]);
    map.addEventListener("mouseover", (event) => (of(event) ? light(axesOf(of(event))) : rest()));
    map.addEventListener("mouseleave", rest);
    map.addEventListener("focusin", (event) => { if (of(event)) { enter(dims, of(event)); light(axesOf(of(event))); } });
    map.addEventListener("focusout", rest);
    map.addEventListener("keydown", (event) => step(event, dims, () => {}));
    map.addEventListener("click", (event) => {
      if (!of(event)) return;
      const axis = axesOf(of(event))[0];
      choose(axis, false);
      rows[axis].scrollIntoView({ block: "nearest" });
    });
  };

  // theme
  const dark = () => getComputedStyle(document.documentElement).colorScheme === "dark" ||
    (!document.documentElement.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
  const redraw = () => {
    one("theme").textContent = dark() ? "Light" : "Dark";
    one("theme").setAttribute("aria-pressed", String(dark()));
    drawn.clear();
    near.forEach(paint);
  };
  one("theme").addEventListener("click", () => {
    document.documentElement.dataset.theme = dark() ? "light" : "dark";
    redraw();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);

  if (story.axes.length) {
    watchList();
    watchMap();
    choice("axis-order", ["By position", "By score"], (i) => { sorted = i === 1; again("chart-axis"); });
    const cost = story.axes.map((strand) => strand.macs);
    choose(cost.indexOf(Math.max(...cost)), false);
  }
  redraw();
  watchCharts();
})();
