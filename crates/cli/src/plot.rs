//! A plot of the loss as an SVG file. Written by hand: a chart of two curves is a screen of code, and plotting
//! crates bring fonts and rasterisers that an SVG does not need.

use std::fmt::Write;

/// A curve, or a level drawn from one end to the other.
pub struct Series {
    pub name: String,
    pub colour: &'static str,
    pub points: Vec<(f64, f64)>,
    pub style: Style,
}

#[derive(Clone, Copy, PartialEq)]
pub enum Style {
    Line,
    Thin,
    Dots,
    Level,
}

const WIDTH: f64 = 840.0;
const HEIGHT: f64 = 460.0;
const LEFT: f64 = 64.0;
const RIGHT: f64 = 24.0;
const TOP: f64 = 48.0;
const BOTTOM: f64 = 56.0;

/// Points of one curve: about two for each pixel.
const MOST_POINTS: usize = 2000;
/// The share of the way along x after which everything must be in the frame.
const SETTLED: f64 = 0.05;

/// The plot of all series over steps.
pub fn svg(title: &str, x_name: &str, y_name: &str, series: &[Series]) -> String {
    let finite = |p: &&(f64, f64)| p.0.is_finite() && p.1.is_finite();
    let points = || series.iter().flat_map(|s| s.points.iter()).filter(finite);
    let (x_low, x_high) = bounds(points().map(|p| p.0));
    // The first fall of a loss would squeeze all the rest: it may leave the frame.
    let settled = x_low + SETTLED * (x_high - x_low);
    let (y_low, y_high) = bounds(points().filter(|p| p.0 >= settled || p.0 == 0.0).map(|p| p.1));
    let margin = (y_high - y_low) * 0.05;
    let (y_low, y_high) = (y_low - margin, y_high + margin);
    let x = |value: f64| LEFT + (value - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT);
    let y = |value: f64| HEIGHT - BOTTOM - (value - y_low) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM);

    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"system-ui, sans-serif\" font-size=\"13\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n\
         <clipPath id=\"frame\"><rect x=\"{LEFT}\" y=\"{TOP}\" width=\"{}\" height=\"{}\"/></clipPath>\n\
         <text x=\"{LEFT}\" y=\"26\" font-size=\"16\" font-weight=\"600\" fill=\"#222\">{}</text>\n",
        WIDTH - LEFT - RIGHT,
        HEIGHT - TOP - BOTTOM,
        escaped(title)
    );
    for tick in ticks(y_low, y_high) {
        let at = y(tick);
        let _ = writeln!(
            out,
            "<line x1=\"{LEFT}\" x2=\"{}\" y1=\"{at:.1}\" y2=\"{at:.1}\" stroke=\"#e6e6e6\"/>\
             <text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\" fill=\"#555\">{}</text>",
            WIDTH - RIGHT,
            LEFT - 8.0,
            at + 4.0,
            label(tick)
        );
    }
    for tick in ticks(x_low, x_high) {
        let at = x(tick);
        let bottom = HEIGHT - BOTTOM;
        let _ = writeln!(
            out,
            "<line x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{bottom}\" y2=\"{}\" stroke=\"#999\"/>\
             <text x=\"{at:.1}\" y=\"{}\" text-anchor=\"middle\" fill=\"#555\">{}</text>",
            bottom + 5.0,
            bottom + 20.0,
            label(tick)
        );
    }
    let _ = writeln!(
        out,
        "<text x=\"{}\" y=\"{}\" text-anchor=\"middle\" fill=\"#333\">{}</text>\
         <text transform=\"translate(16 {}) rotate(-90)\" text-anchor=\"middle\" fill=\"#333\">{}</text>",
        (LEFT + WIDTH - RIGHT) / 2.0,
        HEIGHT - 14.0,
        escaped(x_name),
        (TOP + HEIGHT - BOTTOM) / 2.0,
        escaped(y_name)
    );
    for (row, series) in series.iter().enumerate() {
        draw(&mut out, series, &x, &y, x_low, x_high);
        let at = TOP + 8.0 + 20.0 * row as f64;
        let dash = if series.style == Style::Level { " stroke-dasharray=\"6 4\"" } else { "" };
        let _ = writeln!(
            out,
            "<line x1=\"{0}\" x2=\"{1}\" y1=\"{at}\" y2=\"{at}\" stroke=\"{2}\" stroke-width=\"2.5\"{dash}/>\
             <text x=\"{3}\" y=\"{4}\" text-anchor=\"end\" fill=\"#333\">{5}</text>",
            WIDTH - RIGHT - 30.0,
            WIDTH - RIGHT - 6.0,
            series.colour,
            WIDTH - RIGHT - 38.0,
            at + 4.0,
            escaped(&series.name)
        );
    }
    out.push_str("</svg>\n");
    out
}

fn draw(
    out: &mut String,
    series: &Series,
    x: &impl Fn(f64) -> f64,
    y: &impl Fn(f64) -> f64,
    x_low: f64,
    x_high: f64,
) {
    let colour = series.colour;
    let line = |points: &[(f64, f64)], rest: &str| {
        let path: Vec<String> = points.iter().map(|p| format!("{:.1},{:.1}", x(p.0), y(p.1))).collect();
        format!(
            "<polyline clip-path=\"url(#frame)\" points=\"{}\" fill=\"none\" stroke=\"{colour}\" {rest}/>\n",
            path.join(" ")
        )
    };
    let finite: Vec<(f64, f64)> =
        series.points.iter().copied().filter(|p| p.0.is_finite() && p.1.is_finite()).collect();
    match series.style {
        Style::Line => out.push_str(&line(&finite, "stroke-width=\"2\"")),
        Style::Thin => out.push_str(&line(&finite, "stroke-width=\"1\" stroke-opacity=\"0.35\"")),
        Style::Level => {
            let level = finite.first().map_or(0.0, |p| p.1);
            let ends = [(x_low, level), (x_high, level)];
            out.push_str(&line(&ends, "stroke-width=\"1.5\" stroke-dasharray=\"6 4\""));
        }
        Style::Dots => {
            out.push_str(&line(&finite, "stroke-width=\"1.5\""));
            for point in finite {
                let _ = writeln!(
                    out,
                    "<circle clip-path=\"url(#frame)\" cx=\"{:.1}\" cy=\"{:.1}\" r=\"3\" fill=\"{colour}\"/>",
                    x(point.0),
                    y(point.1)
                );
            }
        }
    }
}

fn bounds(values: impl Iterator<Item = f64>) -> (f64, f64) {
    let (low, high) =
        values.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), v| (low.min(v), high.max(v)));
    match (low.is_finite(), high > low) {
        (false, _) => (0.0, 1.0),
        (true, false) => (low - 0.5, low + 0.5),
        (true, true) => (low, high),
    }
}

/// Round numbers between two bounds, about six of them.
fn ticks(low: f64, high: f64) -> Vec<f64> {
    let rough = (high - low) / 6.0;
    let power = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].into_iter().map(|m| m * power).find(|s| *s >= rough).unwrap_or(rough);
    let first = (low / step).ceil() as i64;
    (first..first + 20).map(|i| i as f64 * step).take_while(|tick| *tick <= high).collect()
}

fn label(tick: f64) -> String {
    let text = format!("{tick:.3}");
    text.trim_end_matches('0').trim_end_matches('.').to_string()
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

/// A running mean over the last `window` points; points that are no numbers are left out.
pub fn smoothed(points: &[(f64, f64)], window: usize) -> Vec<(f64, f64)> {
    let finite: Vec<(f64, f64)> = points.iter().copied().filter(|point| point.1.is_finite()).collect();
    let mut sum = 0.0;
    let mut out = Vec::with_capacity(finite.len());
    for (i, point) in finite.iter().enumerate() {
        sum += point.1;
        if i >= window {
            sum -= finite[i - window].1;
        }
        out.push((point.0, sum / (i + 1).min(window) as f64));
    }
    out
}

/// So few points, evenly taken, that a plot of them is no larger than it must be.
pub fn thinned(points: Vec<(f64, f64)>) -> Vec<(f64, f64)> {
    let every = points.len().div_ceil(MOST_POINTS).max(1);
    let last = points.len().saturating_sub(1);
    points.into_iter().enumerate().filter(|(i, _)| i % every == 0 || *i == last).map(|(_, p)| p).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_inside() {
        assert_eq!(ticks(0.0, 300.0), [0.0, 50.0, 100.0, 150.0, 200.0, 250.0, 300.0]);
        assert_eq!(ticks(1.13, 1.17).first().map(|t| label(*t)), Some("1.13".into()));
    }

    #[test]
    fn one_loss_that_is_no_number_does_not_spoil_the_mean() {
        let points = [(0.0, 1.0), (1.0, f64::NAN), (2.0, 3.0)];
        assert_eq!(smoothed(&points, 2), [(0.0, 1.0), (2.0, 2.0)]);
    }

    #[test]
    fn a_long_curve_is_thinned_and_keeps_its_end() {
        let points: Vec<(f64, f64)> = (0..10_001).map(|i| (f64::from(i), 0.0)).collect();
        let thin = thinned(points);
        assert!(thin.len() <= 2002 && thin.last() == Some(&(10_000.0, 0.0)), "{}", thin.len());
    }

    #[test]
    fn odd_data_make_a_plot_all_the_same() {
        for points in [vec![], vec![(0.0, f64::NAN)], vec![(1.0, 2.0)]] {
            let series = Series { name: "a<b".into(), colour: "#000", points, style: Style::Dots };
            let svg = svg("t", "x", "y", &[series]);
            assert!(svg.contains("a&lt;b") && !svg.contains("NaN"), "{svg}");
        }
    }
}
