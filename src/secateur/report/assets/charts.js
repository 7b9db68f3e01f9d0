"use strict";
// The charts. Each function draws from data into an element; colours are read from the page, so both themes work.

const charts = (() => {
  const probe = document.createElement("i");
  const MOST = 40; // rows of the chart of sensitivities
  const MODE = { displayModeBar: false, responsive: true };

  const colour = (name) => {
    if (!probe.isConnected) { probe.hidden = true; document.body.append(probe); }
    probe.style.color = `var(--${name})`;
    return getComputedStyle(probe).color;
  };
  // Plotly reads some tags and entities in text: what comes from a model must not be taken for them.
  const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const narrow = () => window.innerWidth < 560;
  const short = (text, most) => (text.length > most ? "…" + text.slice(1 - most) : text);
  const label = (text) => plain(short(text, narrow() ? 22 : 34));

  const layout = (height, more) => {
    const axis = { gridcolor: colour("line"), zerolinecolor: colour("line"), linecolor: colour("line"), fixedrange: true };
    const base = {
      height,
      margin: { l: 8, r: 12, t: 8, b: 40 },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, size: 12.5, color: colour("soft") },
      hoverlabel: { bgcolor: colour("card"), bordercolor: colour("line"), font: { color: colour("ink"), size: 13 }, align: "left" },
      legend: { orientation: "h", x: 0, y: 1, yanchor: "bottom", font: { size: 13 } },
      dragmode: false,
      bargap: 0.25,
    };
    return { ...base, ...more, xaxis: { ...axis, ...more.xaxis }, yaxis: { ...axis, ...more.yaxis } };
  };
  const draw = (id, traces, shape) => Plotly.react(id, traces, shape, MODE);

  const named = (names) => ({
    tickvals: names.map((_, i) => i), ticktext: names.map(label), range: [names.length - 0.4, -0.6],
    automargin: true, showgrid: false, tickfont: { family: "monospace", size: 12 }, ticks: "",
  });

  // How tall each chart will be: known before it is drawn, so that nothing moves when it is.
  const heights = {
    layers: (rows) => rows.length * 22 + 90,
    curve: () => 340,
    sensitivity: (sweep) => Math.min(MOST, sweep.sensitivity.length) * 22 + 60,
    axis: (strand) => (strand.scores ? 280 : 150),
    ties: (axes) => Math.min(620, Math.max(200, axes.length * (axes.length <= 40 ? 22 : 6) + 70)),
  };
  const reserve = (id, height) => { const chart = document.getElementById(id); if (chart) chart.style.minHeight = `${height}px`; };

  const layers = (rows, cut) => {
    const y = rows.map((_, i) => i);
    const bar = (name, column, tone, width) => ({
      type: "bar", orientation: "h", name, y, x: rows.map((row) => row[column]), width, marker: { color: colour(tone) },
      customdata: rows.map((row) => [plain(row[0]), row[1], row[2], row[1] ? row[2] / row[1] : 1]),
      hovertemplate: cut
        ? "<b>%{customdata[0]}</b><br>%{customdata[1]:.4s} → %{customdata[2]:.4s} MACs, %{customdata[3]:.1%} left<extra></extra>"
        : "<b>%{customdata[0]}</b><br>%{customdata[1]:.4s} MACs<extra></extra>",
    });
    const traces = cut
      ? [bar("before", 1, "before", 0.78), bar("after", 2, "kept", 0.42)]
      : [bar("MACs", 1, "kept", 0.6)];
    draw("chart-layers", traces, layout(heights.layers(rows), {
      barmode: "overlay", showlegend: cut, margin: { l: 8, r: 12, t: 32, b: 44 },
      xaxis: { title: { text: "MACs" }, tickformat: "~s", rangemode: "tozero" }, yaxis: named(rows.map((row) => row[0])),
    }));
  };

  const curve = (sweep) => {
    const x = sweep.curve.map((point) => point[0]);
    const y = sweep.curve.map((point) => point[1]);
    draw("chart-curve", [{
      type: "scatter", mode: "lines+markers", x, y, line: { color: colour("kept"), width: 2.5 }, marker: { size: 8 },
      hovertemplate: `%{x:.1%} of the ${plain(sweep.cost)} left<br><b>%{y:.4~g}</b> ${plain(sweep.metric)}<extra></extra>`,
    }], layout(heights.curve(), {
      xaxis: { title: { text: plain(sweep.cost) + " left" }, tickformat: ".0%" },
      yaxis: { title: { text: plain(sweep.metric) }, automargin: true }, margin: { l: 12, r: 12, t: 12, b: 48 },
      shapes: sweep.whole === null ? [] : [{
        type: "line", xref: "paper", x0: 0, x1: 1, y0: sweep.whole, y1: sweep.whole,
        line: { color: colour("soft"), width: 1, dash: "dash" },
      }],
    }));
  };

  const sensitivity = (sweep, choose) => {
    const whole = sweep.whole ?? 0;
    const rows = sweep.sensitivity.map(([name, value]) => [name, value, value - whole]);
    rows.sort((a, b) => Math.abs(b[2]) - Math.abs(a[2]));
    rows.splice(MOST);
    draw("chart-sensitivity", [{
      type: "bar", orientation: "h", y: rows.map((_, i) => i), x: rows.map((row) => row[2]),
      marker: { color: colour("gone") }, customdata: rows.map((row) => [plain(row[0]), row[1]]),
      hovertemplate: `<b>%{customdata[0]}</b><br>${plain(sweep.metric)} %{customdata[1]:.4~g}<extra></extra>`,
    }], layout(heights.sensitivity(sweep), {
      xaxis: { title: { text: (sweep.whole === null ? "" : "change of ") + plain(sweep.metric) } },
      yaxis: named(rows.map((row) => row[0])), showlegend: false, margin: { l: 8, r: 12, t: 8, b: 48 },
    }));
    clicked("chart-sensitivity", (point) => choose(rows[point.pointNumber][0]));
  };

  const clicked = (id, act) => {
    const chart = document.getElementById(id);
    chart.removeAllListeners("plotly_click");
    chart.on("plotly_click", (event) => act(event.points[0]));
  };

  // One path for all bars of a kind: thousands of positions stay quick to draw. A bar: where, from, to, its text.
  const bars = (name, tone, drawn) => {
    const x = [], y = [], text = [];
    for (const [at, from, to, said] of drawn) {
      x.push(at, at, null);
      y.push(from, to, null);
      text.push("", said, "");
    }
    return {
      type: "scatter", mode: "lines", name, x, y, text, connectgaps: false,
      line: { color: colour(tone), width: 2, simplify: false }, hovertemplate: "%{text}<extra></extra>",
    };
  };

  const axis = (strand, sorted) => {
    const { scores, mask } = strand;
    const top = scores ? Math.max(...finite(scores), 0) || 1 : 1;
    const tall = scores ? Array.from(scores, (score) => (score === Infinity ? top : score)) : mask.map(() => 1);
    const order = tall.map((_, i) => i);
    if (sorted && scores) order.sort((a, b) => scores[b] - scores[a] || a - b);
    const ranked = sorted && scores;
    const room = (document.getElementById("chart-axis").clientWidth || 600) - 80;
    const each = Math.ceil(order.length / Math.floor(room / 3)); // positions in a bar: one, as long as bars can be told apart
    const split = each > 1 ? binned(order, each, tall, strand, ranked) : single(order, tall, strand);
    const traces = [bars("kept", "kept", split[0]), bars("removed", "gone", split[1])];
    for (const trace of traces) trace.line.width = Math.max(1, Math.min(10, room / Math.ceil(order.length / each) * 0.62));
    draw("chart-axis", traces.filter((trace) => trace.x.length), layout(heights.axis(strand), {
      hovermode: "closest", showlegend: true, margin: { l: 8, r: 8, t: 32, b: 44 },
      xaxis: { title: { text: (ranked ? "rank by score" : "position") + (each > 1 ? `, ${each} in each bar` : "") }, range: [-0.8, order.length - 0.2], showgrid: false },
      yaxis: { title: { text: scores ? (each > 1 ? "mean score" : "score") : "" }, automargin: true, rangemode: "tozero", showticklabels: !!scores },
    }));
  };
  const single = (order, tall, { scores, mask }) => {
    const split = [[], []];
    const said = (position) => `position ${position}, ${mask[position] ? "kept" : "removed"}` +
      (scores ? `<br>score <b>${scores[position] === Infinity ? "∞" : scores[position].toPrecision(3)}</b>` : "");
    order.forEach((position, at) => split[mask[position] ? 0 : 1].push([at, 0, tall[position], said(position)]));
    return split;
  };
  // Many positions in a bar: as tall as their mean, parted by how many of them are kept.
  const binned = (order, each, tall, { scores, mask }, ranked) => {
    const split = [[], []];
    for (let start = 0; start < order.length; start += each) {
      const held = order.slice(start, start + each);
      const kept = held.filter((position) => mask[position]).length;
      const mean = held.reduce((sum, position) => sum + tall[position], 0) / held.length;
      const at = start + (held.length - 1) / 2, border = mean * kept / held.length;
      const said = `${ranked ? "ranks" : "positions"} ${start}–${start + held.length - 1}: ${kept} kept, ` +
        `${held.length - kept} removed` + (scores ? `<br>mean score <b>${mean.toPrecision(3)}</b>` : "");
      if (kept) split[0].push([at, 0, border, said]);
      if (kept < held.length) split[1].push([at, border, mean, said]);
    }
    return split;
  };
  const finite = (scores) => Array.from(scores).filter(Number.isFinite);

  const ties = (axes, modules, choose) => {
    const z = axes.map((strand) => {
      const row = new Array(modules.length).fill(null);
      for (const module of strand.modules) row[module] = strand.kept / strand.size;
      return row;
    });
    const x = modules.map((module) => plain(module || "(top level)"));
    const y = axes.map((strand) => plain(strand.name));
    const step = Math.ceil(axes.length * 14 / (heights.ties(axes) - 70)); // rows to a label, so that labels do not touch
    const told = axes.map((_, i) => i).filter((i) => i % step === 0);
    draw("chart-ties", [{
      type: "heatmap", x, y, z, xgap: x.length > 120 ? 0 : 1, ygap: y.length > 60 ? 0 : 1, hoverongaps: false,
      zmin: 0, zmax: 1, colorscale: [[0, colour("gone")], [0.5, colour("before")], [1, colour("kept")]],
      hovertemplate: "<b>%{y}</b><br>%{x}<br>%{z:.0%} kept<extra></extra>",
      colorbar: {
        thickness: 8, outlinewidth: 0, tickvals: [0, 0.5, 1], ticktext: ["all gone", "half kept", "all kept"],
        orientation: "h", len: 0.6, y: 0, yanchor: "top", x: 0.5,
      },
    }], layout(heights.ties(axes), {
      margin: { l: 8, r: 8, t: 8, b: 52 },
      xaxis: { type: "category", showticklabels: false, ticks: "", showgrid: false },
      yaxis: {
        type: "category", range: [y.length - 0.5, -0.5], automargin: true, showgrid: false, ticks: "",
        tickvals: told.map((i) => y[i]), ticktext: told.map((i) => label(axes[i].name)), tickfont: { family: "monospace", size: 12 },
      },
    }));
    clicked("chart-ties", (point) => choose(axes[point.pointIndex[0]].name));
  };

  const mark = (row) => document.getElementById("chart-ties").layout && Plotly.relayout("chart-ties", {
    shapes: [{
      type: "rect", xref: "paper", x0: 0, x1: 1, y0: row - 0.5, y1: row + 0.5, line: { color: colour("ink"), width: 1.5 },
    }],
  });

  return { heights, reserve, mark, layers, curve, sensitivity, axis, ties };
})();
